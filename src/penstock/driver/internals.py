"""What there is to see of a running topology, and to do with it, beyond the handle of users: for the commands of
``penstock``, the web page, benchmarks and tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from penstock.driver.coordinator import Coordinator
from penstock.driver.load_monitor import LoadMonitor
from penstock.driver.migration_controller import MigrationController
from penstock.driver.outcome import Outcome, judge
from penstock.driver.placement_controller import PlacementController
from penstock.driver.registry import WorkerConnection
from penstock.driver.requests import ChangeRequest, Moved, Replaced
from penstock.driver.scaling_controller import ScalingController
from penstock.driver.status import TopologyStatus, take
from penstock.driver.supervisor import Supervisor
from penstock.errors import SettingError
from penstock.metrics.bus import MetricsBus
from penstock.plan.model import Plan, WorkerId
from penstock.protocol.commands import SetSpoutRate
from penstock.topology.builder import Topology


class Internals:
    """Of one topology; from any thread."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.server: Coordinator = supervisor.server
        self.monitor: LoadMonitor = supervisor.monitor
        self.placing = PlacingInternals(supervisor)
        self.closing = supervisor.closing
        """Set when the tasks are closed and the query is about to be stopped."""
        self.load: Callable[[str], Topology] | None = None
        """Makes a topology of FILE[:OBJECT], for ``penstock replace``; what was loaded before is loaded anew."""
        self.declared = self.topology
        """As its program or file has it, without what was scaled since."""

    # ---- to see ----------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        return self.supervisor.lifecycle.state

    @property
    def restarts(self) -> int:
        """How often its query was started again after a loss."""
        return self.supervisor.lifecycle.restarts.count

    @property
    def topology(self) -> Topology:
        return self.supervisor.runs.current.deployment.topology

    @property
    def plan(self) -> Plan:
        return self.supervisor.runs.current.plan

    @property
    def bus(self) -> MetricsBus:
        """Of the current query run: a replacement has another one, which goes on counting where this one ended."""
        return self.supervisor.runs.current.bus

    @property
    def migrations(self) -> MigrationController:
        """What was decided about data migration since the last start."""
        return self.supervisor.runs.current.migrations

    @property
    def scalings(self) -> ScalingController:
        return self.supervisor.changes.scalings

    @property
    def placements(self) -> PlacementController:
        return self.supervisor.changes.placements

    @property
    def workers(self) -> dict[WorkerId, WorkerConnection]:
        """Those that have connected."""
        return self.supervisor.runs.current.registry.workers

    @property
    def begun(self) -> float | None:
        """When its spouts first emitted, on the monotonic clock."""
        return self.supervisor.begun

    @property
    def left_behind(self) -> str:
        """What became of tuples in flight at the end, where there was no time for them."""
        return self.supervisor.left_behind

    @property
    def committed(self) -> int:
        """The newest committed epoch; 0 for none."""
        return self.supervisor.runs.current.epochs.committed

    @property
    def commit_age(self) -> float | None:
        """Seconds since the last commit; None where the current query run has made none."""
        return self.supervisor.runs.current.epochs.commit_age

    @property
    def epoch(self) -> int:
        """The committed epoch that the current query run began with, or the last one committed before it ended."""
        return self.supervisor.runs.current.epochs.epoch

    @property
    def max_rates(self) -> dict[str, float]:
        """What each spout may emit; ``inf`` where there is no limit."""
        rates, nodes = self.supervisor.runs.rates, self.topology.nodes
        return {spout: rates.get(spout, nodes[spout].max_rate) for spout in self.plan.spouts}

    @property
    def replacements(self) -> list[Replaced]:
        """Those that took place, oldest first."""
        return self.supervisor.changes.replaced

    def status(self) -> TopologyStatus:
        return take(self)

    def outcome(self) -> Outcome:
        """Of a topology that has ended: was its work done?"""
        return judge(self.plan.spouts, self.bus.totals(), self.supervisor.left_behind)

    # ---- to do -----------------------------------------------------------------------------------------

    def set_max_rates(self, rates: Mapping[str, float]) -> None:
        """Limit several spouts; all of them, or none where one is wrong."""
        for spout, rate in rates.items():
            if spout not in self.plan.spouts:
                raise SettingError(
                    f"{spout}.max_rate", f"'{spout}' is not a spout; the spouts are {', '.join(self.plan.spouts)}"
                )
            if not isinstance(rate, int | float) or not rate > 0:
                raise SettingError(f"{spout}.max_rate", f"{rate!r} is not greater than 0 tuples per second")
        runs = self.supervisor.runs
        for spout, rate in rates.items():
            runs.rates[spout] = float(rate)
            runs.current.registry.send(SetSpoutRate(spout, float(rate)))


class PlacingInternals:
    """What there is to see of, and to do about, where workers run. From any thread."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    @property
    def free_slots(self) -> list[tuple[int, str]]:
        """Stages and nodes of slots that workers can move into, one by one."""
        with self._supervisor.server.changed:
            slots = self._supervisor.runs.current.registry.slots.items()
            return sorted((slot.stage, each.hello.node) for slot, each in slots if each.free and slot.stage)

    @property
    def nodes_away(self) -> int:
        """Nodes that were released and not taken back."""
        return self._supervisor.engine.nodes_away

    @property
    def moves(self) -> list[Moved]:
        """Workers that moved alone, oldest first."""
        return self._supervisor.changes.moved

    def explain(self) -> str:
        """What ERDM would do by the newest load sample, and where slots are free, as JSON."""
        answer, slots = json.loads(self._supervisor.monitor.placement()), self.free_slots
        answer["free_slots"] = slots
        if slots:
            shown = ", ".join(f"{node} (stage {stage})" for stage, node in slots)
            answer["lines"].append(f"free slots, to move into alone: {shown}")
        return json.dumps(answer)

    def rearrange(self) -> Replaced | list[Moved] | None:
        """Have ERDM place the workers now, by the newest load sample, and release nodes that it empties. Where
        slots are free workers move one by one, and nodes without any are released the next time; otherwise all go
        by a replacement. None: nothing is worth it, or there is no load sample yet (``explain`` says which)."""
        supervisor = self._supervisor
        changes, runs = supervisor.changes, supervisor.runs

        def decide() -> ChangeRequest | None:
            sample = supervisor.monitor.newest(runs.current.bus)
            return None if sample is None else changes.placer.by_hand(sample, runs.current)

        request = supervisor.call(decide)
        if request is None:
            return None
        done: Replaced | list[Moved] = supervisor.change(request)
        return done

    def spread(self) -> int:
        """Use all nodes, released ones too: the workers are spread over them as soon as they have joined. Returns
        how many more there are to be."""
        supervisor = self._supervisor
        placer, runs = supervisor.changes.placer, supervisor.runs
        more, request = supervisor.call(lambda: placer.take_back("by hand: all nodes", runs.current))
        if request is not None:
            supervisor.request(request)
        return more
