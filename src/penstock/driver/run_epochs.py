"""The epochs of one query run: the epoch it began with, the epochs it commits, and steps that commit one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from penstock.clock import Clock
from penstock.driver.commit_thread import CommitLoop, CommitRequest, CommitShell
from penstock.driver.commits import Commits
from penstock.driver.deployment import Deployment
from penstock.driver.registry import WorkerRegistry
from penstock.driver.steps import Problem, Step, Watch
from penstock.errors import PenstockError, StateError
from penstock.faults import CrashPoint


class RunEpochs:
    """Called on the supervisor's thread; any thread may use ``committed`` and ``commit_age``."""

    def __init__(
        self,
        deployment: Deployment,
        registry: WorkerRegistry,
        clock: Clock,
        make_shell: Callable[[CommitLoop], CommitShell],
        crashes: bool,
    ) -> None:
        """``crashes``: whether crash points apply to this run."""
        self.epoch = 0
        """The committed epoch that the run began with; after ``stop``, the last one that it committed."""
        self.published = 0
        """The newest epoch that all sinks were known to have published when ``stop`` was called. 0 if there is
        none."""
        self._deployment, self._registry, self._clock = deployment, registry, clock
        self._settings = deployment.topology.settings
        self._make_shell, self._crashes = make_shell, crashes
        self._shell: CommitShell | None = None

    @property
    def running(self) -> bool:
        """Whether epochs are being committed."""
        return self._shell is not None

    @property
    def error(self) -> PenstockError | None:
        """The error that ended commits, if any."""
        return None if self._shell is None else self._shell.loop.error

    @property
    def committed(self) -> int:
        """The newest committed epoch. 0 if there is none."""
        shell = self._shell
        return self.epoch if shell is None else shell.loop.commits.committed

    @property
    def commit_age(self) -> float | None:
        """Seconds since the last commit. None if this run has not committed an epoch."""
        shell = self._shell
        at = None if shell is None else shell.loop.commits.committed_at
        return None if at is None else self._clock.monotonic() - at

    def begin(self, stateful: bool) -> None:
        """Start commits, if there is something to commit. Called when the tasks are open."""
        guarantee = self._settings.delivery.guarantee
        if guarantee == "exactly_once" or (guarantee == "at_least_once" and stateful):
            self._start(self._settings.delivery.epoch_interval)

    def begin_handover(self) -> None:
        """Make commits possible if the run does not commit yet, because its state is to be handed over to another
        process. Epochs are then committed on request only."""
        if self._shell is not None:
            return
        state = self._deployment.state
        if self._settings.delivery.guarantee == "at_most_once":
            if self.epoch == 0:  # it began with nothing, so the directory has the state of an older run
                state.clear()
            state.recover()
        self._start(math.inf)

    def _start(self, interval: float) -> None:
        state, settings = self._deployment.state, self._settings
        self.epoch = state.epoch
        crash = CrashPoint(settings.lifecycle.crash_at if self._crashes else "", "driver")
        commits = Commits(
            self._deployment.plan,
            settings.delivery.guarantee,
            interval,
            state.store,
            state.owner,
            self.epoch,
            self._registry.send,
            crash,
            state.published,
            settings.delivery.overtake_after,
        )
        loop = CommitLoop(commits, state.store, self._registry.epoch_events, self._notify)
        self._shell = self._make_shell(loop)
        self._shell.start()

    def _notify(self) -> None:
        with self._registry.changed:
            self._registry.changed.notify_all()

    def commit_shell(self) -> CommitShell:
        """Return what runs the commit loop. Raises ``StateError`` if nothing is committed."""
        if self._shell is None:
            guarantee = self._settings.delivery.guarantee
            raise StateError(
                f"topology '{self._deployment.topology.name}'",
                f"it commits no epochs: it does not run, or keeps no state (its delivery is {guarantee})",
                "Check that it runs, with --set delivery=at_least_once or exactly_once.",
            )
        return self._shell

    def commit_step(
        self,
        name: str,
        watch: Sequence[Watch],
        on_problem: Callable[[Problem], Problem | None] | None = None,
        last: bool = False,
        moves: bool = False,
        cancellable: bool = True,
        patience: float | None = None,
    ) -> Step:
        """Return a step that commits an epoch that ends now, and waits until its sinks have published it.
        ``last``: this run commits no further epoch. ``moves``: a worker leaves its slot with this epoch, while
        other commits are paused. ``patience``: see ``CommitRequest``."""
        request = CommitRequest(last=last, moves=moves, patience=patience)

        def given_up(problem: Problem) -> Problem | None:
            request.dropped = True
            return problem if on_problem is None else on_problem(problem)

        return Step(
            name,
            lambda: self.commit_shell().loop.request(request),
            lambda: request.result is not None,
            expected="no epoch was committed",
            limit=self._settings.lifecycle.drain_timeout,
            watch=(*watch, request),
            on_problem=given_up,
            cancellable=cancellable,
        )

    def stop(self) -> None:
        """Stop commits. An epoch that is not committed yet is given up."""
        if self._shell is not None:
            self._shell.stop()
            commits = self._shell.loop.commits
            self.epoch, self.published = commits.committed, commits.published
            self._shell = None
