"""Access to a running topology beyond the public handle, for the commands of ``penstock``, the web page,
benchmarks and tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from penstock.driver.ackers import AckerStatus
from penstock.driver.coordinator import Coordinator
from penstock.driver.load_monitor import LoadMonitor
from penstock.driver.migration_controller import MigrationController
from penstock.driver.outcome import Outcome, judge
from penstock.driver.placement_controller import PlacementController
from penstock.driver.refit_controller import RefitController
from penstock.driver.registry import WorkerConnection
from penstock.driver.requests import ChangeRequest, Moved, Replaced, ReplaceRequest
from penstock.driver.scaling_controller import ScalingController
from penstock.driver.status import TopologyStatus, take
from penstock.driver.supervisor import Supervisor
from penstock.errors import SettingError
from penstock.metrics.bus import MetricsBus
from penstock.plan.model import Plan, WorkerId
from penstock.protocol.commands import SetSpoutRate
from penstock.topology.builder import Topology


class Internals:
    """The internals of one topology. May be used from any thread."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.server: Coordinator = supervisor.server
        self.monitor: LoadMonitor = supervisor.monitor
        self.placing = PlacingInternals(supervisor)
        self.closing = supervisor.closing
        """Set when the tasks are closed and the query is about to be stopped."""
        self.load: Callable[[str], Topology] | None = None
        """Loads a topology from FILE[:OBJECT] for ``penstock replace``. Modules that were loaded before are loaded
        again. None if the topology was not started from a file."""
        self.declared = self.topology.as_declared()
        """The topology as its program or file declares it, without later changes of the parallelism."""

    # ---- status ----------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        return self.supervisor.lifecycle.state

    @property
    def restarts(self) -> int:
        """Number of restarts of the query."""
        return self.supervisor.lifecycle.restarts.count

    @property
    def topology(self) -> Topology:
        return self.supervisor.runs.current.deployment.topology

    @property
    def plan(self) -> Plan:
        return self.supervisor.runs.current.plan

    @property
    def bus(self) -> MetricsBus:
        """The metrics of the current query run. A replacement has another bus, which continues the counters of the
        old one."""
        return self.supervisor.runs.current.bus

    @property
    def migrations(self) -> MigrationController:
        """The migration controller of the current query run, with its decisions."""
        return self.supervisor.runs.current.migrations

    @property
    def scalings(self) -> ScalingController:
        return self.supervisor.changes.scalings

    @property
    def refits(self) -> RefitController:
        return self.supervisor.changes.refits

    @property
    def placements(self) -> PlacementController:
        return self.supervisor.changes.placements

    @property
    def workers(self) -> dict[WorkerId, WorkerConnection]:
        """The workers that have connected."""
        return self.supervisor.runs.current.registry.workers

    @property
    def ackers(self) -> list[AckerStatus]:
        """The ackers of the current query run; empty if acks are not tracked."""
        return self.supervisor.runs.current.registry.ackers.status()

    @property
    def begun(self) -> float | None:
        """When the spouts were first activated, on the monotonic clock. None before that."""
        return self.supervisor.begun

    @property
    def left_behind(self) -> str:
        """What was not finished when the topology ended, as a clause. Empty if everything was."""
        return self.supervisor.left_behind

    @property
    def committed(self) -> int:
        """The newest committed epoch, or 0."""
        return self.supervisor.runs.current.epochs.committed

    @property
    def commit_age(self) -> float | None:
        """Seconds since the last commit. None if the current query run has not committed yet."""
        return self.supervisor.runs.current.epochs.commit_age

    @property
    def epoch(self) -> int:
        """The committed epoch that the current query run started from. After the query run has ended, the last
        epoch that it committed."""
        return self.supervisor.runs.current.epochs.epoch

    @property
    def max_rates(self) -> dict[str, float]:
        """The limit of each spout in tuples per second; ``inf`` if there is none."""
        rates, nodes = self.supervisor.runs.rates, self.topology.nodes
        return {spout: rates.get(spout, nodes[spout].max_rate) for spout in self.plan.spouts}

    @property
    def replacements(self) -> list[Replaced]:
        """Completed replacements, oldest first."""
        return self.supervisor.changes.replaced

    def status(self) -> TopologyStatus:
        return take(self)

    def outcome(self) -> Outcome:
        """Return how the topology ended. Called after it has ended."""
        return judge(self.plan.spouts, self.bus.totals(), self.supervisor.left_behind)

    # ---- changes ---------------------------------------------------------------------------------------

    def reload(self, target: str, pause: bool) -> Replaced:
        """Replace the topology by what FILE[:OBJECT] declares now. Bolts that were scaled at run time keep their
        parallelism, unless the file changes it. Raises ``SettingError`` if the topology was not started from a
        file, and the errors of ``RunningTopology.replace``."""
        if self.load is None:
            raise SettingError(
                f"topology '{self.topology.name}'",
                "it was started by submit() in a program, so it cannot be replaced from a file",
                "Call handle.replace(topology) there.",
            )
        topology = self.load(target)
        request = ReplaceRequest(topology, "changed code", pause, declared=self.declared)
        replaced: Replaced = self.supervisor.change(request)
        self.declared = topology
        return replaced

    def set_max_rates(self, rates: Mapping[str, float]) -> None:
        """Limit the rates of several spouts. Raises ``SettingError`` and changes nothing if one of the limits is
        invalid."""
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
    """The internals that concern the placement of workers on nodes. May be used from any thread."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    @property
    def free_slots(self) -> list[tuple[int, str]]:
        """Stage and node of each free slot that a worker can move into."""
        with self._supervisor.server.changed:
            slots = self._supervisor.runs.current.registry.slots.items()
            return sorted((slot.stage, each.hello.node) for slot, each in slots if each.free and slot.stage)

    @property
    def nodes_away(self) -> int:
        """Number of nodes that were released and not requested again."""
        return self._supervisor.engine.nodes_away

    @property
    def moves(self) -> list[Moved]:
        """Completed moves of single workers, oldest first."""
        return self._supervisor.changes.moved

    def explain(self) -> str:
        """Return the moves that ERDM proposes for the newest load sample, and the free slots, as JSON."""
        answer, slots = json.loads(self._supervisor.monitor.placement()), self.free_slots
        answer["free_slots"] = slots
        if slots:
            shown = ", ".join(f"{node} (stage {stage})" for stage, node in slots)
            answer["lines"].append(f"free slots for a single worker to move into: {shown}")
        return json.dumps(answer)

    def rearrange(self) -> Replaced | list[Moved] | None:
        """Place the workers now as ERDM decides on the newest load sample, and release nodes that become empty.

        If slots are free where workers should run, these workers move one by one, and empty nodes are released by
        the next call. Otherwise all workers are placed by a replacement. Returns None if no move is worthwhile or
        there is no load sample yet; ``explain`` says which. Raises a ``PenstockError`` if the change fails.
        """
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
        """Request the released nodes again, and spread the workers over all nodes as soon as these have joined.
        Does not wait for it. Returns the number of nodes that will be used in addition."""
        supervisor = self._supervisor
        placer, runs = supervisor.changes.placer, supervisor.runs
        return supervisor.call(lambda: placer.take_back("by hand: all nodes", runs.current))
