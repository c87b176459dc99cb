"""The handle of a running topology, which ``penstock.submit`` returns."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from penstock.driver.drain import Drain
from penstock.driver.internals import Internals
from penstock.driver.refit_controller import RefitChoice
from penstock.driver.requests import Moved, MoveRequest, Replaced, ReplaceRequest
from penstock.driver.status import TopologyStatus
from penstock.driver.supervisor import Supervisor
from penstock.errors import PenstockError, SettingError
from penstock.plan.model import WorkerId
from penstock.plan.slot_placement import SlotPlacement
from penstock.state.store import StateStore
from penstock.topology.builder import Topology


class RunningTopology:
    """A running topology, returned by ``submit``. It is a context manager, which kills the topology at the end of
    the ``with`` block. Its methods may be called from any thread."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.internals = Internals(supervisor)
        """For the commands of ``penstock``. Not part of the public API: it may change without notice."""

    # ---- properties and status -------------------------------------------------------------------------

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
        """The error with which the topology failed. None if it has not failed."""
        return self._supervisor.lifecycle.error

    def status(self) -> TopologyStatus:
        """Return the current status of the topology: its state, tasks, workers and counters."""
        return self.internals.status()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the topology has ended, at most ``timeout`` seconds. Returns whether it has ended. Raises the
        topology's error if it failed."""
        return self._supervisor.wait(timeout)

    # ---- spouts ----------------------------------------------------------------------------------------

    def activate(self) -> None:
        """Activate the spouts, so that they emit. Raises ``TopologyFailed`` if the topology does not run."""
        self._supervisor.spouts(True)

    def deactivate(self) -> None:
        """Deactivate the spouts, so that they stop emitting. Tuples in flight are still processed. Raises
        ``TopologyFailed`` if the topology does not run."""
        self._supervisor.spouts(False)

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until no tuple is in flight, at most ``timeout`` seconds (by default the setting
        ``lifecycle.drain_timeout``). Call ``deactivate`` first. Returns False if tuples are still in flight, or if
        a worker has failed or is lost."""
        run = self._supervisor.runs.current
        limit = run.settings.lifecycle.drain_timeout if timeout is None else timeout
        drained = Drain(run.registry).done
        return self._supervisor.runner.waiter.wait_for(lambda: drained() or run.registry.broken, limit) and (
            not run.registry.broken
        )

    def set_max_rate(self, spout: str, rate: float) -> None:
        """Limit a spout to ``rate`` tuples per second from now on, over all its tasks; ``inf`` removes the limit.
        The limit also holds after restarts of the query. Raises ``SettingError`` if there is no such spout or the
        rate is not above 0."""
        self.internals.set_max_rates({spout: rate})

    # ---- state -----------------------------------------------------------------------------------------

    def commit(self, timeout: float = 60.0) -> int:
        """End an epoch now, commit it, and wait until all sinks have published it. Returns the newest published
        epoch. Raises ``StateError`` if the commit fails or takes longer than ``timeout`` seconds, or if the
        topology has no state to commit."""
        return self._supervisor.runs.current.epochs.commit_shell().loop.commit_now(timeout)

    def savepoint(self, url: str, timeout: float = 60.0) -> int:
        """Commit an epoch now and copy it to ``url``. A topology can be started from the copy. Returns the epoch
        that was copied. Raises ``StateError`` as ``commit`` does, and if the epoch cannot be copied."""
        return self._supervisor.runs.current.epochs.commit_shell().loop.savepoint(StateStore(url), timeout)

    # ---- changes ---------------------------------------------------------------------------------------

    def scale(self, parallelism: Mapping[str, int], reason: str = "by hand", pause: bool = False) -> Replaced:
        """Change the parallelism of components by a replacement (see ``replace``). Components that are not named
        keep the parallelism that they have when the change is carried out."""
        request = ReplaceRequest(None, reason, pause, parallelism=dict(parallelism))
        replaced: Replaced = self._supervisor.change(request)
        return replaced

    def refit(self, workers: int | None = None) -> Replaced | None:
        """Pack the components into workers anew, by their measured load, as a replacement (see ``replace``).
        Returns None if they are packed so already; then nothing happens.

        ``workers``: the most workers from now on, without those of blocking components; by default as many as
        before, and 0 for as many as the master offers cores. Before any load was measured, every executor weighs
        the same: the first sample is complete after ``workers.refit_after`` / 6."""
        if workers is not None and (type(workers) is not int or workers < 0):
            text = f"{workers!r} is not a number of workers: it must be a whole number from 1, or 0 for the cores"
            raise SettingError(f"topology '{self.name}'", text)
        supervisor = self._supervisor

        def decide() -> RefitChoice | None:
            return supervisor.changes.refits.by_hand(supervisor.engine.cores() if workers == 0 else workers)

        choice = supervisor.call(decide)
        if choice is None:
            return None
        replaced: Replaced = supervisor.change(ReplaceRequest(None, choice.reason, fit=choice.fit))
        return replaced

    def replace(self, topology: Topology, reason: str = "by hand", pause: bool = False) -> Replaced:
        """Replace the running topology by another form of it, with other numbers of tasks or changed code. The new
        form takes over the state of each component. Returns when the spouts of the new form emit.

        Raises a ``PenstockError`` if the replacement fails. The old form then continues, if necessary after a
        restart; only if workers are lost after the new form has taken over, the new form is restarted instead.
        ``pause``: stop the old form first, for example because there are not enough task slots for both.
        """
        replaced: Replaced = self._supervisor.change(ReplaceRequest(topology, reason, pause))
        return replaced

    def place(
        self,
        nodes: Mapping[WorkerId, str] | Mapping[str, str],
        reason: str = "by hand",
        leave: Collection[str] = (),
    ) -> Replaced:
        """Run workers, such as "1.0", on other nodes. Workers that are not named may run on any node.
        ``status().workers`` lists the nodes and tasks of all workers.

        This is a replacement by the same topology, with the guarantees of ``replace``. ``leave``: nodes to
        release. A worker then runs on its wanted node only if Spark happens to start enough tasks there.
        """
        supervisor = self._supervisor
        wanted = {self._worker(worker): node for worker, node in nodes.items()}
        placement = SlotPlacement(wanted, exact=not leave)
        placer, runs = supervisor.changes.placer, supervisor.runs
        request = supervisor.call(lambda: placer.request(placement, frozenset(leave), reason, runs.current))
        replaced: Replaced = supervisor.change(request)
        return replaced

    def move(self, worker: WorkerId | str, node: str, reason: str = "by hand") -> Moved:
        """Move one worker of bolts, such as "1.0", to another node, while all other workers continue where they
        are. The node must have a free slot (setting ``placement.spare_slots``). Raises a ``PenstockError`` if the
        move fails; the worker then stays where it is, if necessary after a restart of the query."""
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
        """End the topology and wait until it has ended. With ``drain``, the spouts are deactivated, tuples in
        flight are processed, and a last epoch is committed. Then the tasks are closed and the query is stopped.
        Raises the topology's error if it fails meanwhile. Does nothing if the topology has already ended."""
        self._supervisor.kill(drain)

    def __enter__(self) -> RunningTopology:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
