"""The load monitor of a running topology: once a load sample, what executors, streams and nodes were up
to; for placement policies, for people, for a database. It meters the energy too."""

from __future__ import annotations

import json
from collections.abc import Mapping

from penstock.clock import Clock, SystemClock
from penstock.control.energy import PowerModel
from penstock.control.placement_report import as_json, explain
from penstock.driver.energy_meter import EnergyMeter
from penstock.driver.load_sample import LoadReading, MonitorSample, node_capacities, read_load, sample_between
from penstock.driver.load_store import LoadStore, open_store
from penstock.driver.placement_controller import plan_for
from penstock.driver.registry import WorkerConnection
from penstock.metrics.bus import MetricsBus
from penstock.plan.model import WorkerId
from penstock.settings import Settings

_METERED = 6
"""Times a load sample energy is counted: every 5 s, so that what a lost query run used last is mostly
counted."""


class LoadMonitor:
    """One for a topology, its restarts and its replacements. ``poll`` is called by one thread, the rest by any.

    With ``monitor=off`` workers do not tell their streams: no load samples are made and nothing is kept, but
    energy is still metered, without the network's part.
    """

    def __init__(self, settings: Settings, clock: Clock | None = None, store: LoadStore | None = None) -> None:
        """``store``: instead of that of the settings. Raises where that can never work."""
        self.sample: MonitorSample | None = None
        """The newest; None: none yet since the last start, restart or replacement."""
        self.energy = EnergyMeter(PowerModel(*map(float, settings.placement.watts.split(","))))
        self._settings, self._clock = settings, clock or SystemClock()
        self._store = store or open_store(
            settings.monitor.store, settings.delivery.state_dir, settings.monitor.keep
        )
        self._bus: MetricsBus | None = None
        self._attempt = -1
        self._first: LoadReading | None = None
        """Where the load sample that is under way began."""
        self._metered = -1.0
        self._reported_drops = 0
        """Dropped load samples that were spoken of."""

    @property
    def on(self) -> bool:
        return self._settings.monitored

    def poll(
        self, now: float, bus: MetricsBus, workers: Mapping[WorkerId, WorkerConnection]
    ) -> MonitorSample | None:
        """Called a few times a second with the bus and the workers of the current query run; ``now`` on the bus'
        clock, ``workers`` not to be changed meanwhile. Does something only when something is due. Returns a load
        sample when one has just ended."""
        if not self._due(now, bus):
            return None
        reading = read_load(now, bus.plan, bus.load(), workers)
        self._metered = now
        self._meter(reading)
        if not self.on:
            return None
        if bus is not self._bus or reading.load.attempt != self._attempt:
            self._first = self.sample = None  # first: ``newest`` is asked by other threads
            self._bus, self._attempt = bus, reading.load.attempt
        if not reading.complete:
            return None  # a worker is missing: the query is about to be started again, or has just been
        if self._first is None:
            self._first = reading
            return None
        if now - self._first.time < self._settings.monitor.window:
            return None
        sample = sample_between(self._first, reading, self._clock.now(), self._settings)
        self._first, self.sample = reading, sample
        self._keep(sample, bus)
        return sample

    def newest(self, bus: MetricsBus) -> MonitorSample | None:
        """The newest load sample of the query run that has this bus; None: it has none yet."""
        sample = self.sample
        return sample if bus is self._bus and bus.load().attempt == self._attempt else None

    def apply_settings(self, settings: Settings) -> None:
        """From now on; what is kept goes where it went before."""
        self._settings = settings
        self._first = self.sample = None

    def placement(self) -> str:
        """What ERDM would do by the newest load sample, as JSON for ``penstock placement``: ``lines`` for people,
        ``plan`` for programs; null while there is no load sample."""
        sample = self.sample
        if sample is None:
            return json.dumps({"ended": None, "lines": [self._why_none()], "plan": None})
        plan = plan_for(sample, self._settings)
        return json.dumps({"ended": sample.ended, "lines": explain(plan), "plan": as_json(plan)})

    def close(self) -> None:
        """Waits a few seconds for what is not written yet."""
        if self._store is not None:
            self._store.close()

    def _due(self, now: float, bus: MetricsBus) -> bool:
        if self.on and (self._first is None or bus is not self._bus):
            return True
        length = self._settings.monitor.window
        ends = self._first is not None and now - self._first.time >= length
        return ends or self._metered < 0 or now - self._metered >= length / _METERED

    def _meter(self, reading: LoadReading) -> None:
        """The network's part is that of the last load sample: streams are told less often."""
        sample = self.sample
        bandwidths = {} if sample is None else {node.node: node.used.bandwidth for node in sample.nodes}
        self.energy.update(reading, node_capacities(reading, self._settings), bandwidths)

    def _keep(self, sample: MonitorSample, bus: MetricsBus) -> None:
        if self._store is None:
            return
        self._store.put(sample)
        if self._store.dropped > self._reported_drops:
            self._reported_drops = self._store.dropped
            samples = f"{self._reported_drops} load sample{'' if self._reported_drops == 1 else 's'}"
            bus.note("monitor", "", f"{samples} not kept so far: {self._store.error}")

    def _why_none(self) -> str:
        if not self.on:
            return (
                "the load monitor is off: start the topology with --set monitor=memory, or sqlite to keep samples"
            )
        length = self._settings.monitor.window
        if self._first is None:
            return f"no load sample yet: the first begins when all workers have reported, and takes {length:g} s"
        left = max(0.0, self._first.time + length - self._clock.monotonic())
        return f"no load sample yet: the first ends in {left:.0f} s"
