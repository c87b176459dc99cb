"""The thread that commits epochs, and the requests it takes from outside.

A savepoint is asked for by a file in the state directory, so that it can be asked for from any machine that
reaches the directory, with no port to know: ``requests/NAME.json`` with the place to copy to; the answer is
``requests/NAME.done``. A request is signed with the deployment key: whoever can only write to the directory could
otherwise have the state, and secrets that a URL refers to, sent to a place of their choice.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock import signing
from penstock.driver.commits import Commits, read_published
from penstock.errors import PenstockError, StateError
from penstock.plan.model import WorkerId
from penstock.protocol.messages import EpochPublished, Message, SnapshotFailed, SnapshotWritten, SpoutsSnapshotted
from penstock.redaction import described
from penstock.state import manifest as manifests
from penstock.state import savepoints
from penstock.state.manifest import TaskEntry
from penstock.state.store import StateStore
from penstock.texts import parse_json

log = logging.getLogger("penstock.commits")

_LOOK = 0.05  # seconds between two looks at the clock
_ASK = 0.2  # seconds between two times that whoever waits for an epoch is asked whether to go on
_REQUESTS = 1.0  # seconds between two looks for requests
REQUESTS = "requests"
_PURPOSE = "state.request"


@dataclass
class _Waiting:
    """A request for an epoch that begins from now on."""

    done: Callable[[PenstockError | None], None]
    epoch: int | None = None
    last: bool = False
    moves: bool = False
    dropped: bool = False
    """Nobody waits any longer."""


class CommitThread:
    """Feeds ``Commits`` with what workers say, with time, and with requests."""

    def __init__(
        self,
        commits: Commits,
        store: StateStore,
        events: queue.SimpleQueue[tuple[WorkerId, Message] | tuple[()] | None],
        notify: Callable[[], None],
    ) -> None:
        self.commits = commits
        self.error: PenstockError | None = None
        """Why the thread gave up, if it did."""
        self._store, self._events, self._notify = store, events, notify
        self._wanted: queue.SimpleQueue[_Waiting] = queue.SimpleQueue()
        self._waiting: list[_Waiting] = []
        self._looked = 0.0
        self._looking = threading.Lock()
        self._paused = False
        self._seen: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="commits", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what is under way is not committed."""
        self._events.put(None)
        self._thread.join(10)

    def commit_now(self, timeout: float, last: bool = False, go_on: Callable[[], None] = lambda: None) -> int:
        """Commit an epoch that ends now, its sinks published too; returns it. Raises ``StateError`` where that
        fails or takes too long. ``last``: no other will be begun. ``go_on`` is asked meanwhile and may raise."""
        return self._want(lambda: self.commits.published, timeout, last, go_on)

    def pause(self) -> None:
        """Begin no epoch from now on, until ``resume``, other than by ``commit_with_move``."""
        with self._looking:
            self._paused = True

    def resume(self) -> None:
        self._paused = False

    def commit_with_move(self, timeout: float, go_on: Callable[[], None]) -> int:
        """Commit an epoch with which a worker leaves, while others are paused. Raises ``StateError`` where that
        fails at the first try or takes too long."""
        return self._want(lambda: self.commits.published, timeout, go_on=go_on, moves=True)

    def savepoint(self, target: StateStore, timeout: float) -> int:
        """The same, and copy it; returns the epoch copied."""
        return self._want(lambda: save(self._store, target, self.commits.published), timeout)

    def _want(
        self,
        then: Callable[[], int],
        timeout: float,
        last: bool = False,
        go_on: Callable[[], None] = lambda: None,
        moves: bool = False,
    ) -> int:
        """Have ``then`` called, by the thread, when an epoch that ends from now on is published."""
        answer: queue.SimpleQueue[int | PenstockError] = queue.SimpleQueue()

        def done(error: PenstockError | None) -> None:
            try:
                answer.put(error or then())
            except PenstockError as failed:
                answer.put(failed)

        waiting = _Waiting(done, last=last, moves=moves)
        self._wanted.put(waiting)
        self._events.put(())  # look at once
        deadline = time.monotonic() + timeout
        while True:
            try:
                found = answer.get(timeout=max(0.0, min(_ASK, deadline - time.monotonic())))
                break
            except queue.Empty:
                try:
                    go_on()
                except BaseException:
                    waiting.dropped = True
                    raise
                if time.monotonic() >= deadline:
                    waiting.dropped = True
                    raise StateError("commits", f"no epoch was committed within {timeout:g} s") from None
        if isinstance(found, PenstockError):
            raise found
        return found

    def _run(self) -> None:
        try:
            while True:
                try:
                    event = self._events.get(timeout=_LOOK)
                except queue.Empty:
                    event = ()
                if event is None:
                    break
                if event:
                    self._take(*event)
                self._look(time.monotonic())
                self._notify()
        except PenstockError as error:
            self.error = error
        except Exception as error:  # a bug of ours must not look like an end
            self.error = PenstockError("commits", f"internal error (please report it): {error!r}")
        while not self._wanted.empty():
            self._waiting.append(self._wanted.get())
        for waiting in self._waiting:
            waiting.done(self.error or StateError("commits", "the topology ended before the epoch was committed"))
        self._notify()

    def _take(self, worker: WorkerId, message: Message) -> None:
        commits = self.commits
        if isinstance(message, SpoutsSnapshotted):
            commits.spouts_snapshotted(worker, message.epoch)
        elif isinstance(message, SnapshotWritten):
            commits.snapshot_written(worker, message.epoch, message.tasks)
        elif isinstance(message, SnapshotFailed):
            commits.snapshot_failed(worker, message.epoch, message.error)
        elif isinstance(message, EpochPublished):
            commits.epoch_published(worker, message.epoch)

    def _look(self, now: float) -> None:
        with self._looking:
            self._begin(now)
        if now - self._looked > _REQUESTS:
            self._looked = now
            self._look_for_requests()
        for waiting in list(self._waiting):
            if waiting.epoch is not None and not self.commits.expects(waiting.epoch):
                waiting.epoch = None  # it was given up: the next will do
                if waiting.moves:
                    self._waiting.remove(waiting)
                    waiting.done(StateError("commits", "the epoch with which a worker leaves was given up"))
            elif waiting.epoch is not None and self.commits.published >= waiting.epoch:
                self._waiting.remove(waiting)
                waiting.done(None)

    def _begin(self, now: float) -> None:
        """The epochs that are due, and those that are asked for."""
        if not self._paused:
            self.commits.tick(now)
        while not self._wanted.empty():
            self._waiting.append(self._wanted.get())
        self._waiting = [waiting for waiting in self._waiting if not waiting.dropped]
        for waiting in self._waiting:
            may = waiting.moves or not self._paused
            if waiting.epoch is None and may and self.commits.begin(now, waiting.last, waiting.moves):
                waiting.epoch = self.commits.newest

    # ---- savepoints ------------------------------------------------------------------------------------

    def _look_for_requests(self) -> None:
        try:
            found = [name for name in self._store.list(f"{REQUESTS}/") if name.endswith(".json")]
        except StateError as error:
            log.warning("no look for requests: %s", error)
            return
        for name in found:
            if name in self._seen:
                continue
            self._seen.add(name)
            try:
                target = _requested(name, self._store.read(name))
            except (StateError, ValueError, LookupError, TypeError) as error:  # anyone may put a file there
                self._answer(
                    name,
                    {
                        "error": str(
                            StateError(
                                f"request {name}",
                                f"it names no folder or URL, or lacks this deployment's signature ({error})",
                            )
                        )
                    },
                )
            else:
                self._waiting.append(_Waiting(self._save_to(name, target)))

    def _save_to(self, name: str, target: str) -> Callable[[PenstockError | None], None]:
        def done(error: PenstockError | None) -> None:
            answer: dict[str, Any]
            try:
                if error is not None:
                    raise error
                answer = {"epoch": save(self._store, StateStore(target), self.commits.published)}
            except Exception as failed:  # the file system behind the target may raise anything
                answer = {"error": str(failed) if isinstance(failed, PenstockError) else described(failed)}
            self._answer(name, answer)

        return done

    def _answer(self, name: str, answer: dict[str, Any]) -> None:
        """Say what became of a request. The topology does not end because that cannot be said."""
        try:
            self._store.write(f"{name.removesuffix('.json')}.done", json.dumps(answer).encode())
            self._store.remove(name)
            self._seen.discard(name)
        except StateError as error:
            log.warning("no answer to %s: %s", name, error)


def request(name: str, target: str) -> bytes:
    """The content of the request file ``name``: copy the state to ``target``, an absolute path or URL."""
    return json.dumps({"to": target, "signature": _signature(name, target).hex()}).encode()


def _signature(name: str, target: str) -> bytes:
    return signing.sign(_PURPOSE, f"{name}\0{target}".encode())


def _requested(name: str, data: bytes) -> str:
    """Where to copy to. Raises ``ValueError``, ``LookupError`` or ``TypeError`` for what ``request`` did not make,
    and for a relative path: relative to what, only who asks knows."""
    content = parse_json(data)
    target = str(content["to"])
    if not hmac.compare_digest(bytes.fromhex(content["signature"]), _signature(name, target)):
        raise ValueError("a request that was signed with another key, or changed")
    if "://" not in target and not os.path.isabs(target):
        raise ValueError(f"a relative path: {target}")
    return target


def save(store: StateStore, target: StateStore, published: int) -> int:
    """Copy the newest epoch that all sinks have published, so that nothing they prepared is needed; returns it.
    Raises ``StateError`` where there is none."""
    manifest = manifests.newest(store, before=published + 1)
    if manifest is None or not manifest.epoch:
        raise StateError(f"state directory {store.url}", "it holds no published epoch")
    tasks = {key: TaskEntry(entry.parts, []) for key, entry in manifest.tasks.items()}
    savepoints.write_savepoint(store, replace(manifest, tasks=tasks), target)
    return manifest.epoch


def save_at_rest(store: StateStore, target: StateStore) -> int:
    """The same for a topology that does not run. Raises ``StateError`` where its sinks have yet to publish."""
    newest = manifests.newest(store)
    if newest is None or not newest.epoch:
        raise StateError(f"state directory {store.url}", "it holds no committed epoch")
    published = read_published(store, newest.generation)
    if published < newest.epoch and any(entry.tokens for entry in newest.tasks.values()):
        raise StateError(
            f"topology '{newest.topology}'",
            f"its sinks have published epoch {published} only, and not yet epoch {newest.epoch}",
            "Start it once more, and end it with Ctrl-C.",
        )
    return save(store, target, newest.epoch)
