"""The load monitor: takes a load sample of executors, streams and nodes at each interval, for placement policies,
users and a database. It also drives the energy meter."""

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

_READINGS_PER_SAMPLE = 6
"""Energy readings per load sample: one every 5 s with the default of 30 s. A query run that is lost loses the
energy since the last reading, so readings are more frequent than load samples."""


class LoadMonitor:
    """Serves one topology across restarts and replacements. One thread calls ``poll``; any thread may call the
    rest.

    With ``monitor=off`` workers do not report their streams. No load samples are taken or stored, and the energy
    is metered without the network's share.
    """

    def __init__(self, settings: Settings, clock: Clock | None = None, store: LoadStore | None = None) -> None:
        """``store`` overrides the store of the settings. Raises ``SettingError`` or ``EnvironmentFault`` if the
        settings name a store that can never work."""
        self.sample: MonitorSample | None = None
        """The newest load sample of the current query run. None if there is none yet."""
        self.energy = EnergyMeter(PowerModel(*map(float, settings.placement.watts.split(","))))
        self._settings, self._clock = settings, clock or SystemClock()
        self._store = store or open_store(
            settings.monitor.store, settings.delivery.state_dir, settings.monitor.keep
        )
        self._bus: MetricsBus | None = None
        self._attempt = -1
        self._first: LoadReading | None = None
        """The reading at the start of the load sample in progress."""
        self._metered = -1.0
        self._reported_drops = 0
        """The number of dropped load samples when it was last reported."""

    @property
    def on(self) -> bool:
        return self._settings.monitored

    def poll(
        self, now: float, bus: MetricsBus, workers: Mapping[WorkerId, WorkerConnection]
    ) -> MonitorSample | None:
        """Take a reading if one is due, and return the load sample if one has just ended.

        Called several times per second with the metrics bus and the workers of the current query run. ``now`` is
        on the clock of the bus. The caller must not change ``workers`` during the call.
        """
        if not self._due(now, bus):
            return None
        reading = read_load(now, bus.plan, bus.load(), workers)
        self._metered = now
        self._meter(reading)
        if not self.on:
            return None
        if bus is not self._bus or reading.load.attempt != self._attempt:
            self._first = self.sample = None  # before ``_bus``: other threads call ``newest``
            self._bus, self._attempt = bus, reading.load.attempt
        if not reading.complete:
            return None  # a worker has not connected or reported yet, or was lost
        if self._first is None:
            self._first = reading
            return None
        if now - self._first.time < self._settings.monitor.interval:
            return None
        sample = sample_between(self._first, reading, self._clock.now(), self._settings)
        self._first, self.sample = reading, sample
        self._store_sample(sample, bus)
        return sample

    def newest(self, bus: MetricsBus) -> MonitorSample | None:
        """Return the newest load sample of the query run that uses this bus, or None."""
        sample = self.sample
        return sample if bus is self._bus and bus.load().attempt == self._attempt else None

    def apply_settings(self, settings: Settings) -> None:
        """Use other settings from now on. The store of load samples stays the same."""
        self._settings = settings
        self._first = self.sample = None

    def placement(self) -> str:
        """Return the moves that ERDM proposes for the newest load sample, as JSON for ``penstock placement``.
        ``lines`` is for people and ``plan`` for programs; ``plan`` is null if there is no load sample."""
        sample = self.sample
        if sample is None:
            return json.dumps({"ended": None, "lines": [self._why_none()], "plan": None})
        plan = plan_for(sample, self._settings)
        return json.dumps({"ended": sample.ended, "lines": explain(plan), "plan": as_json(plan)})

    def close(self) -> None:
        """Close the store. Waits a few seconds for load samples that are not written yet."""
        if self._store is not None:
            self._store.close()

    def _due(self, now: float, bus: MetricsBus) -> bool:
        if self.on and (self._first is None or bus is not self._bus):
            return True
        length = self._settings.monitor.interval
        ends = self._first is not None and now - self._first.time >= length
        return ends or self._metered < 0 or now - self._metered >= length / _READINGS_PER_SAMPLE

    def _meter(self, reading: LoadReading) -> None:
        """Update the energy meter. Workers report their streams less often, so the network's share is that of the
        last load sample."""
        sample = self.sample
        bandwidths = {} if sample is None else {node.node: node.used.bandwidth for node in sample.nodes}
        self.energy.update(reading, node_capacities(reading, self._settings), bandwidths)

    def _store_sample(self, sample: MonitorSample, bus: MetricsBus) -> None:
        if self._store is None:
            return
        self._store.put(sample)
        if self._store.dropped > self._reported_drops:
            self._reported_drops = self._store.dropped
            samples = f"{self._reported_drops} load sample{'' if self._reported_drops == 1 else 's'}"
            bus.note("monitor", "", f"{samples} could not be stored so far: {self._store.error}")

    def _why_none(self) -> str:
        if not self.on:
            return (
                "the load monitor is off: start the topology with --set monitor=memory, or sqlite to keep samples"
            )
        length = self._settings.monitor.interval
        if self._first is None:
            return f"no load sample yet: the first begins when all workers have reported, and takes {length:g} s"
        left = max(0.0, self._first.time + length - self._clock.monotonic())
        return f"no load sample yet: the first ends in {left:.0f} s"
