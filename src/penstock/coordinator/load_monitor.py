"""The load monitor of a running topology (SPEC 6.2): once a window, what executors, streams and nodes were up to;
for placement policies, for people, for a database. It meters the energy too."""

from __future__ import annotations

import json
from collections.abc import Mapping

from penstock.clock import Clock, SystemClock
from penstock.control.energy import PowerModel
from penstock.control.placement_report import as_json, explain
from penstock.coordinator.crew import Connection
from penstock.coordinator.energy_meter import EnergyMeter
from penstock.coordinator.load_store import LoadStore, open_store
from penstock.coordinator.load_window import Look, Window, between, node_capacities, take_look
from penstock.coordinator.placements import plan_for
from penstock.metrics.bus import MetricsBus
from penstock.plan.model import SlotId
from penstock.settings import Settings

_METERED = 6
"""Times a window energy is counted: every 5 s, so that what a start that was lost used last is mostly counted."""


class LoadMonitor:
    """One for a topology, its restarts and its replacements. ``look`` is called by one thread, the rest by any.

    With ``monitor=off`` slots do not tell their streams: no windows are made and nothing is kept, but energy is
    still metered, without the network's part.
    """

    def __init__(self, settings: Settings, clock: Clock | None = None, store: LoadStore | None = None) -> None:
        """``store``: instead of that of the settings. Raises where that can never work."""
        self.window: Window | None = None
        """The newest; None: none yet since the start, the restart or the replacement."""
        self.energy = EnergyMeter(PowerModel(*map(float, settings.node_watts.split(","))))
        self._settings, self._clock = settings, clock or SystemClock()
        self._store = store or open_store(settings.monitor, settings.state_dir, settings.monitor_keep)
        self._bus: MetricsBus | None = None
        self._attempt = -1
        self._first: Look | None = None
        """Where the window that is under way began."""
        self._metered = -1.0
        self._told = 0
        """Dropped windows that were spoken of."""

    @property
    def on(self) -> bool:
        return self._settings.monitored

    def look(self, now: float, bus: MetricsBus, slots: Mapping[SlotId, Connection]) -> Window | None:
        """Called a few times a second with the bus and the slots of the start that runs; ``now`` on the bus'
        clock, ``slots`` not to be changed meanwhile. Does something only when something is due. Returns a window
        when one has just ended."""
        if not self._due(now, bus):
            return None
        look = take_look(now, bus.plan, bus.load(), slots)
        self._metered = now
        self._meter(look)
        if not self.on:
            return None
        if bus is not self._bus or look.load.attempt != self._attempt:
            self._first = self.window = None  # first: ``newest`` is asked by other threads
            self._bus, self._attempt = bus, look.load.attempt
        if not look.whole:
            return None  # a slot is missing: the query is about to be started again, or has just been
        if self._first is None:
            self._first = look
            return None
        if now - self._first.time < self._settings.monitor_window:
            return None
        window = between(self._first, look, self._clock.now(), self._settings)
        self._first, self.window = look, window
        self._keep(window, bus)
        return window

    def newest(self, bus: MetricsBus) -> Window | None:
        """The newest window of the start that has this bus; None: it has none yet."""
        window = self.window
        return window if bus is self._bus and bus.load().attempt == self._attempt else None

    def use(self, settings: Settings) -> None:
        """From now on; what is kept goes where it went before."""
        self._settings = settings
        self._first = self.window = None

    def placement(self) -> str:
        """What ERDM would do by the newest window, as JSON for ``penstock placement``: ``lines`` for people,
        ``plan`` for programs; null while there is no window."""
        window = self.window
        if window is None:
            return json.dumps({"ended": None, "lines": [self._why_none()], "plan": None})
        plan = plan_for(window, self._settings)
        return json.dumps({"ended": window.ended, "lines": explain(plan), "plan": as_json(plan)})

    def close(self) -> None:
        """Waits a few seconds for what is not written yet."""
        if self._store is not None:
            self._store.close()

    def _due(self, now: float, bus: MetricsBus) -> bool:
        if self.on and (self._first is None or bus is not self._bus):
            return True
        window = self._settings.monitor_window
        ends = self._first is not None and now - self._first.time >= window
        return ends or self._metered < 0 or now - self._metered >= window / _METERED

    def _meter(self, look: Look) -> None:
        """The network's part is that of the last window: streams are told less often."""
        window = self.window
        bandwidths = {} if window is None else {node.node: node.used.bandwidth for node in window.nodes}
        self.energy.tick(look, node_capacities(look, self._settings), bandwidths)

    def _keep(self, window: Window, bus: MetricsBus) -> None:
        if self._store is None:
            return
        self._store.put(window)
        if self._store.dropped > self._told:
            self._told = self._store.dropped
            windows = f"{self._told} window{'' if self._told == 1 else 's'}"
            bus.note("monitor", "", f"{windows} not kept so far: {self._store.error}")

    def _why_none(self) -> str:
        if not self.on:
            return (
                "the load monitor is off: start the topology with --set monitor=memory, or sqlite to keep windows"
            )
        length = self._settings.monitor_window
        if self._first is None:
            return f"no window yet: the first begins when all slots have reported, and takes {length:g} s"
        left = max(0.0, self._first.time + length - self._clock.monotonic())
        return f"no window yet: the first ends in {left:.0f} s"
