"""The loop that commits epochs, the requests it takes from other threads, and the thread it runs in."""

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

_LOOK = 0.05  # seconds between two looks at the clock
EpochEvents = queue.SimpleQueue[tuple[WorkerId, EpochEvent] | tuple[()] | None]
"""What workers say of epochs; an empty tuple: look at the requests; None: the end."""


@dataclass(eq=False)
class CommitRequest:
    """Somebody wants an epoch that ends from now on. Made by any thread, answered by the loop. A ``Watch``: a
    failed request ends the wait of a step."""

    last: bool = False
    """The query run commits no other."""
    moves: bool = False
    """A worker leaves with it, while other commits are paused. It is not tried a second time."""
    then: Callable[[PenstockError | None, int], int] | None = None
    """Called by the loop with the error, or the newest epoch that all sinks have published; makes the result."""
    epoch: int | None = None
    """The epoch that was begun for it."""
    dropped: bool = False
    """Nobody waits any longer."""
    result: int | None = None
    error: PenstockError | None = None
    answered: threading.Event = field(default_factory=threading.Event)

    def alarm(self) -> bool:
        return self.error is not None

    def check(self) -> Problem | None:
        return None if self.error is None else Problem(Cause.FAILED, self.error)

    def answer(self, error: PenstockError | None, published: int) -> None:
        """Called by the loop."""
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
    """Feeds ``Commits`` with what workers say, with time, and with requests. ``turn`` and ``finish`` are called by
    one thread, the rest by any."""

    def __init__(
        self, commits: Commits, store: StateStore, events: EpochEvents, notify: Callable[[], None]
    ) -> None:
        """``notify`` is called after each turn: somebody may wait for what has changed."""
        self.commits = commits
        self.error: PenstockError | None = None
        """Why the loop gave up, if it did."""
        self._store, self.events, self._notify = store, events, notify
        self._wanted: queue.SimpleQueue[CommitRequest] = queue.SimpleQueue()
        self._waiting: list[CommitRequest] = []
        self._files = SavepointRequests(store)
        self._beginning = threading.Lock()
        self._paused = self._finished = False

    # ---- for any thread --------------------------------------------------------------------------------

    def want(self, request: CommitRequest) -> None:
        """Have an epoch committed, its sinks published too."""
        self._wanted.put(request)
        self.events.put(())  # look at once
        if self._finished:  # nobody will look
            self._answer_all()

    def commit_now(self, timeout: float) -> int:
        """Commit an epoch that ends now, its sinks published too; returns it. Raises ``StateError`` where that
        fails or takes too long."""
        return self._wait(CommitRequest(), timeout)

    def savepoint(self, target: StateStore, timeout: float) -> int:
        """The same, and copy it; returns the epoch copied."""

        def copy(error: PenstockError | None, published: int) -> int:
            if error is not None:
                raise error
            return save(self._store, target, published)

        return self._wait(CommitRequest(then=copy), timeout)

    def pause(self) -> None:
        """Begin no epoch from now on, until ``resume``, other than one with which a worker moves."""
        with self._beginning:
            self._paused = True

    def resume(self) -> None:
        self._paused = False

    def stop(self) -> None:
        """Have ``turn`` end the loop; what is under way is not committed."""
        self.events.put(None)

    def _wait(self, request: CommitRequest, timeout: float) -> int:
        self.want(request)
        if not request.answered.wait(timeout):
            request.dropped = True
            raise StateError("commits", f"no epoch was committed within {timeout:g} s")
        if request.error is not None:
            raise request.error
        assert request.result is not None
        return request.result

    # ---- the loop --------------------------------------------------------------------------------------

    def turn(self, now: float, seconds: float = 0.0) -> bool:
        """Take what a worker said, waiting for it so many seconds, and do what is due. False: the loop has
        ended."""
        try:
            event = self.events.get(timeout=seconds) if seconds else self.events.get_nowait()
        except queue.Empty:
            event = ()
        if event is None:
            return False
        try:
            if event:
                self.commits.handle(*event)
            self._look(now if not seconds else time.monotonic())
        except PenstockError as error:
            self.error = error
        except Exception as error:  # a bug of ours must not look like an end
            self.error = PenstockError("commits", f"internal error (please report it): {error!r}")
        self._notify()
        return self.error is None

    def finish(self) -> None:
        """Behind the last turn: answer whoever waits."""
        self._finished = True
        self._answer_all()
        self._notify()

    def _answer_all(self) -> None:
        """Answer all requests with why there will be no commit."""
        ended = StateError("commits", "the topology ended before the epoch was committed")
        with self._beginning:
            self._collect()
            requests, self._waiting = self._waiting, []
        for request in requests:
            request.answer(self.error or ended, 0)

    def _look(self, now: float) -> None:
        with self._beginning:
            self._begin(now)
        for name, target in self._files.new(now):
            self._waiting.append(CommitRequest(then=partial(self._files.save, name, target)))
        for request in list(self._waiting):
            if request.epoch is not None and not self.commits.expects(request.epoch):
                request.epoch = None  # it was given up: the next will do
                if request.moves:
                    self._waiting.remove(request)
                    request.answer(StateError("commits", "the epoch with which a worker leaves was given up"), 0)
            elif request.epoch is not None and self.commits.published >= request.epoch:
                self._waiting.remove(request)
                request.answer(None, self.commits.published)

    def _begin(self, now: float) -> None:
        """The epochs that are due, and those that are asked for."""
        if not self._paused:
            self.commits.tick(now)
        self._collect()
        self._waiting = [request for request in self._waiting if not request.dropped]
        for request in self._waiting:
            may = request.moves or not self._paused
            if request.epoch is None and may and self.commits.start_commit(now, request.last, request.moves):
                request.epoch = self.commits.newest

    def _collect(self) -> None:
        while not self._wanted.empty():
            self._waiting.append(self._wanted.get())


class CommitShell(Protocol):
    """What has a loop run."""

    loop: CommitLoop

    def start(self) -> None: ...

    def stop(self) -> None:
        """End the loop; what is under way is not committed."""
        ...


class CommitThread:
    """Runs a loop in a thread of its own: writing a manifest must not hold anybody up."""

    def __init__(self, loop: CommitLoop) -> None:
        self.loop = loop
        self._thread = threading.Thread(target=self._run, name="commits", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.loop.stop()
        self._thread.join(10)

    def _run(self) -> None:
        while self.loop.turn(time.monotonic(), _LOOK):
            pass
        self.loop.finish()
