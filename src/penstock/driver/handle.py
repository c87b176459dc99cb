"""The handle of a running topology: what ``penstock.submit`` returns."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from penstock.driver.drain import Drain
from penstock.driver.internals import Internals
from penstock.driver.requests import Moved, MoveRequest, Replaced, ReplaceRequest
from penstock.driver.status import TopologyStatus
from penstock.driver.supervisor import Supervisor
from penstock.errors import PenstockError, SettingError
from penstock.plan.model import WorkerId
from penstock.plan.slot_placement import SlotPlacement
from penstock.state.store import StateStore
from penstock.topology.builder import Topology


class RunningTopology:
    """A topology that runs. Made by ``submit``. A context manager, which kills the topology at its end. Its
    methods may be called from any thread."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.internals = Internals(supervisor)
        """What the commands of ``penstock`` use beyond this handle. It may change."""

    # ---- what it is ------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The topology's name."""
        return self.internals.topology.name

    @property
    def state(self) -> str:
        """``starting``, ``active``, ``inactive``, ``restarting``, ``ending``, ``ended`` or ``failed``."""
        return self.internals.state

    @property
    def error(self) -> PenstockError | None:
        """Why the topology failed, if it did."""
        return self._supervisor.lifecycle.error

    def status(self) -> TopologyStatus:
        """All there is to see of the topology, now."""
        return self.internals.status()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the topology has ended, at most ``timeout`` seconds. Raises its error if it failed; False: it
        still runs."""
        return self._supervisor.wait(timeout)

    # ---- spouts ----------------------------------------------------------------------------------------

    def activate(self) -> None:
        """Let the spouts emit. Raises ``TopologyFailed`` where the topology does not run."""
        self._supervisor.spouts(True)

    def deactivate(self) -> None:
        """Let the spouts pause; what is in flight is still processed. Raises ``TopologyFailed`` where the topology
        does not run."""
        self._supervisor.spouts(False)

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until no tuple is in flight, at most ``timeout`` seconds (by default the setting
        ``lifecycle.drain_timeout``). Of use once the spouts are inactive. False: tuples are still in flight, or a
        worker is gone."""
        run = self._supervisor.runs.current
        limit = run.settings.lifecycle.drain_timeout if timeout is None else timeout
        drained = Drain(run.registry).done
        return self._supervisor.runner.waiter.wait_for(lambda: drained() or run.registry.broken, limit) and (
            not run.registry.broken
        )

    def set_max_rate(self, spout: str, rate: float) -> None:
        """Let a spout emit at most ``rate`` tuples a second from now on, all its tasks together; ``inf`` for no
        limit. This also holds after restarts of the query."""
        self.internals.set_max_rates({spout: rate})

    # ---- state -----------------------------------------------------------------------------------------

    def commit(self, timeout: float = 60.0) -> int:
        """End an epoch now and commit it; returns its number. Raises ``StateError`` where that fails or takes too
        long, or where the topology keeps nothing to commit."""
        return self._supervisor.runs.current.epochs.expect().loop.commit_now(timeout)

    def savepoint(self, url: str, timeout: float = 60.0) -> int:
        """Commit an epoch now and copy it to ``url``, from where a topology can be started; returns its number."""
        return self._supervisor.runs.current.epochs.expect().loop.savepoint(StateStore(url), timeout)

    # ---- changes ---------------------------------------------------------------------------------------

    def scale(self, parallelism: Mapping[str, int], reason: str = "by hand", pause: bool = False) -> Replaced:
        """Replace the topology by the same one with other numbers of tasks; components that are not named keep
        theirs. See ``replace``."""
        return self.replace(self.internals.topology.scaled(parallelism), reason, pause)

    def replace(self, topology: Topology, reason: str = "by hand", pause: bool = False) -> Replaced:
        """Let another form of the topology take over while this one runs: other numbers of tasks, or changed code.
        State is handed over by component. Returns when the spouts of the new form emit. Raises what keeps it from
        that; then the old form goes on. ``pause``: stop this form first, where there are no task slots for
        both."""
        replaced: Replaced = self._supervisor.change(ReplaceRequest(topology, reason, pause))
        return replaced

    def place(
        self,
        nodes: Mapping[WorkerId, str] | Mapping[str, str],
        reason: str = "by hand",
        leave: Collection[str] = (),
    ) -> Replaced:
        """Let workers, as "1.0", run on other nodes; those that are not named go anywhere. The names of nodes and
        the tasks of each worker are in ``status().workers``. This is a replacement by the same topology: state and
        guarantees are those of ``replace``. ``leave``: nodes to release; workers are then placed only as far as
        Spark spreads its tasks that way."""
        supervisor = self._supervisor
        wanted = {self._worker(worker): node for worker, node in nodes.items()}
        placement = SlotPlacement(wanted, exact=not leave)
        placer, runs = supervisor.changes.placer, supervisor.runs
        request = supervisor.call(lambda: placer.request(placement, frozenset(leave), reason, runs.current))
        replaced: Replaced = supervisor.change(request)
        return replaced

    def move(self, worker: WorkerId | str, node: str, reason: str = "by hand") -> Moved:
        """Let one worker of bolts, as "1.0", run on another node, while all others go on where they are. Needs a
        slot that is free there (setting ``placement.spare_slots``). Raises what keeps it from that; then the
        worker stays where it is."""
        current = self._supervisor.runs.current
        wanted = {self._worker(worker): node}
        moved: list[Moved] = self._supervisor.change(MoveRequest(wanted, reason, current.number))
        return moved[0]

    def _worker(self, worker: WorkerId | str) -> WorkerId:
        known = {str(each): each for each in self.internals.plan.worker_ids()}
        if str(worker) not in known:
            text = f"it has no worker {worker}, only {', '.join(known)}"
            raise SettingError(f"topology '{self.name}'", text)
        return known[str(worker)]

    # ---- the end ---------------------------------------------------------------------------------------

    def kill(self, drain: bool = True) -> None:
        """End the topology: pause the spouts, let what is in flight finish (unless ``drain`` is False), commit,
        close the tasks, stop. Raises the topology's error if it fails on the way. Does nothing if it has ended."""
        self._supervisor.kill(drain)

    def __enter__(self) -> RunningTopology:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
