"""Runs the loop that commits epochs in a thread of its own. Other threads send it requests for commits and
savepoints."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from penstock.driver.commits import Commits
from penstock.driver.registry import EpochEvent
from penstock.driver.savepoint_requests import SavepointRequests, save
from penstock.driver.steps import Cause, Problem
from penstock.errors import PenstockError, StateError
from penstock.plan.model import WorkerId
from penstock.state.store import StateStore

log = logging.getLogger("penstock.commits")

_POLL_INTERVAL = 0.05
"""Seconds that the loop waits for an event at most, so that an epoch begins at most so much later than it is
due."""
EpochEvents = queue.SimpleQueue[tuple[WorkerId, EpochEvent] | tuple[()] | None]
"""Events of workers about epochs. An empty tuple wakes the loop, which then looks at new requests. None ends the
loop."""


@dataclass(eq=False)
class CommitRequest:
    """A request to commit an epoch that ends after the request. Any thread may make one; the loop answers it. It
    is a ``Watch``, so that a step that waits for the request ends if the request fails."""

    last: bool = False
    """Whether this is the last epoch that the query run commits."""
    moves: bool = False
    """Whether a worker leaves its process with this epoch. The epoch is begun even while commits are paused. If it
    is abandoned, the request fails; other requests get the next epoch."""
    patience: float | None = None
    """Seconds after which the marker of the epoch overtakes the tuples that wait (exactly-once delivery). None:
    ``delivery.overtake_after``; infinity: never."""
    then: Callable[[PenstockError | None, int], int] | None = None
    """Called by the loop with the error, if there is one, and the newest epoch that all sinks have published.
    Returns the result of the request, or raises its error."""
    epoch: int | None = None
    """The epoch that was begun for this request. None until there is one."""
    dropped: bool = False
    """Set by the requesting thread when it no longer waits."""
    result: int | None = None
    error: PenstockError | None = None
    answered: threading.Event = field(default_factory=threading.Event)

    def alarm(self) -> bool:
        return self.error is not None

    def check(self) -> Problem | None:
        return None if self.error is None else Problem(Cause.FAILED, self.error)

    def answer(self, error: PenstockError | None, published: int) -> None:
        """Set the result or the error. Called by the loop."""
        self.error = error
        if self.then is not None:
            try:
                self.result = self.then(error, published)
            except PenstockError as failed:
                self.error = failed
        elif error is None:
            self.result = published
        self.answered.set()


class CommitLoop:
    """Passes the events of workers, the time, and requests to ``Commits``. One thread calls ``turn`` and
    ``finish``; any thread may call the other methods."""

    def __init__(
        self, commits: Commits, store: StateStore, events: EpochEvents, notify: Callable[[], None]
    ) -> None:
        """``notify`` is called after each turn, to wake threads that wait for a commit."""
        self.commits = commits
        self.error: PenstockError | None = None
        """The error that ended the loop, if there was one."""
        self._store, self.events, self._notify = store, events, notify
        self._new_requests: queue.SimpleQueue[CommitRequest] = queue.SimpleQueue()
        self._waiting: list[CommitRequest] = []
        self._files = SavepointRequests(store)
        self._begin_lock = threading.Lock()
        """Held while epochs begin, so that none begins after ``pause`` has returned."""
        self._paused = self._finished = False

    # ---- for any thread --------------------------------------------------------------------------------

    def request(self, request: CommitRequest) -> None:
        """Request that an epoch is committed and published by all sinks. Does not wait. After the end of the loop
        the request is answered with an error at once."""
        self._new_requests.put(request)
        self.events.put(())  # wakes the loop
        if self._finished:
            self._refuse_all()

    def commit_now(self, timeout: float) -> int:
        """Commit an epoch that ends now, and wait until all sinks have published it. Returns the newest published
        epoch. Raises ``StateError`` if the commit fails or takes longer than ``timeout`` seconds."""
        return self._wait(CommitRequest(), timeout)

    def savepoint(self, target: StateStore, timeout: float) -> int:
        """Do the same as ``commit_now`` and copy the newest published epoch to ``target``. Returns the epoch that
        was copied."""

        def copy(error: PenstockError | None, published: int) -> int:
            if error is not None:
                raise error
            return save(self._store, target, published)

        return self._wait(CommitRequest(then=copy), timeout)

    def pause(self) -> None:
        """Begin no epoch until ``resume`` is called, except an epoch with which a worker moves."""
        with self._begin_lock:
            self._paused = True

    def resume(self) -> None:
        self._paused = False

    def stop(self) -> None:
        """Make ``turn`` end the loop. Epochs in progress are not committed."""
        self.events.put(None)

    def _wait(self, request: CommitRequest, timeout: float) -> int:
        self.request(request)
        if not request.answered.wait(timeout):
            request.dropped = True
            raise StateError("commits", f"no epoch was committed within {timeout:g} s")
        if request.error is not None:
            raise request.error
        assert request.result is not None
        return request.result

    # ---- the loop --------------------------------------------------------------------------------------

    def turn(self, now: float, seconds: float = 0.0) -> bool:
        """Wait at most ``seconds`` for an event of a worker, handle it, and begin or finish commits that are due.
        ``now`` is the time on the monotonic clock; after a wait, the clock is read instead. Returns False if the
        loop has ended."""
        try:
            event = self.events.get(timeout=seconds) if seconds else self.events.get_nowait()
        except queue.Empty:
            event = ()
        if event is None:
            return False
        try:
            if event:
                self.commits.handle(*event)
            self._handle_requests(now if not seconds else time.monotonic())
        except PenstockError as error:
            self.error = error
        except Exception as error:  # a bug in Penstock must be reported as an error, not as a normal end
            self.error = PenstockError("commits", f"internal error (please report it): {error!r}")
        self._notify()
        return self.error is None

    def finish(self) -> None:
        """Refuse all requests that still wait, and all later ones. Called once, after the last turn."""
        self._finished = True
        self._refuse_all()
        self._notify()

    def _refuse_all(self) -> None:
        ended = StateError("commits", "the topology ended before the epoch was committed")
        with self._begin_lock:
            self._collect()
            requests, self._waiting = self._waiting, []
        for request in requests:
            request.answer(self.error or ended, 0)

    def _handle_requests(self, now: float) -> None:
        with self._begin_lock:
            self._begin(now)
        for name, target in self._files.new(now):
            self._waiting.append(CommitRequest(then=partial(self._files.save, name, target)))
        for request in list(self._waiting):
            if request.epoch is not None and not self.commits.expects(request.epoch):
                request.epoch = None  # the epoch was abandoned; the next one serves the request
                if request.moves:
                    self._waiting.remove(request)
                    request.answer(
                        StateError("commits", "the epoch that the move of a worker needs was not committed"), 0
                    )
            elif request.epoch is not None and self.commits.published >= request.epoch:
                self._waiting.remove(request)
                request.answer(None, self.commits.published)

    def _begin(self, now: float) -> None:
        """Begin the epochs that are due, and those that are requested."""
        if not self._paused:
            self.commits.tick(now)
        self._collect()
        self._waiting = [request for request in self._waiting if not request.dropped]
        for request in self._waiting:
            if request.epoch is not None or (self._paused and not request.moves):
                continue
            if self.commits.start_commit(now, request.last, request.moves, request.patience):
                request.epoch = self.commits.newest

    def _collect(self) -> None:
        while not self._new_requests.empty():
            self._waiting.append(self._new_requests.get())


class CommitShell(Protocol):
    """Runs a ``CommitLoop``. ``CommitThread`` does so in a thread; tests have their own."""

    loop: CommitLoop

    def start(self) -> None: ...

    def stop(self) -> None:
        """End the loop. Epochs in progress are not committed."""
        ...


class CommitThread:
    """Runs a loop in a thread of its own, so that no other thread waits while a manifest is written."""

    def __init__(self, loop: CommitLoop) -> None:
        self.loop = loop
        self._thread = threading.Thread(target=self._run, name="commits", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.loop.stop()
        self._thread.join(10)  # seconds; a store that does not answer must not keep the query run from ending

    def _run(self) -> None:
        while self.loop.turn(time.monotonic(), _POLL_INTERVAL):
            pass
        self.loop.finish()
