"""The thread that commits epochs, and the requests it takes from outside.

A savepoint is asked for by a file in the state directory, so that it can be asked for from any machine that
reaches the directory, with no port to know: ``requests/NAME.json`` with the place to copy to; the answer is
``requests/NAME.done``.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.coordinator.commits import Commits
from penstock.coordinator.messages import Message, NotSnapped, Published, Snapped, SpoutsCut
from penstock.errors import PenstockError, StateError
from penstock.plan.model import SlotId
from penstock.state import manifest as manifests
from penstock.state.manifest import TaskEntry
from penstock.state.store import StateStore

log = logging.getLogger("penstock.commits")

_LOOK = 0.05  # seconds between two looks at the clock
_REQUESTS = 1.0  # seconds between two looks for requests
REQUESTS = "requests"


@dataclass
class _Waiting:
    """A request for an epoch that begins from now on."""

    done: Callable[[PenstockError | None], None]
    epoch: int | None = None


class CommitThread:
    """Feeds ``Commits`` with what slots say, with time, and with requests."""

    def __init__(
        self,
        commits: Commits,
        store: StateStore,
        events: queue.SimpleQueue[tuple[SlotId, Message] | None],
        notify: Callable[[], None],
    ) -> None:
        self.commits = commits
        self.error: PenstockError | None = None
        """Why the thread gave up, if it did."""
        self._store, self._events, self._notify = store, events, notify
        self._wanted: queue.SimpleQueue[_Waiting] = queue.SimpleQueue()
        self._waiting: list[_Waiting] = []
        self._looked = 0.0
        self._seen: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="commits", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what is under way is not committed."""
        self._events.put(None)
        self._thread.join(10)

    def commit_now(self, timeout: float) -> int | None:
        """Commit an epoch that ends now, its sinks published too; returns it, or None if that took too long."""
        finished = threading.Event()
        self._wanted.put(_Waiting(lambda error: finished.set()))
        return self.commits.committed if finished.wait(timeout) and self.error is None else None

    def _run(self) -> None:
        try:
            while True:
                try:
                    event = self._events.get(timeout=_LOOK)
                except queue.Empty:
                    event = ()  # type: ignore[assignment]
                if event is None:
                    break
                if event:
                    self._take(*event)
                self._look(time.monotonic())
                self._notify()
        except PenstockError as error:
            self.error = error
        except Exception as error:  # a bug of ours must not look like an end
            self.error = PenstockError("commits", "must not fail", repr(error))
        while not self._wanted.empty():
            self._waiting.append(self._wanted.get())
        for waiting in self._waiting:
            waiting.done(self.error or StateError("commits", "the topology must go on running", "its end"))
        self._notify()

    def _take(self, slot: SlotId, message: Message) -> None:
        commits = self.commits
        if isinstance(message, SpoutsCut):
            commits.cut(slot, message.epoch)
        elif isinstance(message, Snapped):
            commits.snapped(slot, message.epoch, message.tasks)
        elif isinstance(message, NotSnapped):
            commits.failed(slot, message.epoch, message.error)
        elif isinstance(message, Published):
            commits.told(slot, message.epoch)

    def _look(self, now: float) -> None:
        self.commits.tick(now)
        while not self._wanted.empty():
            self._waiting.append(self._wanted.get())
        if now - self._looked > _REQUESTS:
            self._looked = now
            self._look_for_requests()
        for waiting in list(self._waiting):
            if waiting.epoch is None and self.commits.begin(now):
                waiting.epoch = self.commits.newest
            if waiting.epoch is not None and self.commits.published >= waiting.epoch:
                self._waiting.remove(waiting)
                waiting.done(None)

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
                target = str(json.loads(self._store.read(name))["to"])
            except (StateError, ValueError, LookupError, TypeError) as error:  # anyone may put a file there
                rule = 'must hold {"to": a folder or URL}'
                self._answer(name, {"error": str(StateError(f"request {name}", rule, str(error)))})
            else:
                self._waiting.append(_Waiting(self._save_to(name, target)))

    def _save_to(self, name: str, target: str) -> Callable[[PenstockError | None], None]:
        def save(error: PenstockError | None) -> None:
            answer: dict[str, Any]
            try:
                if error is not None:
                    raise error
                answer = {"epoch": save_newest(self._store, StateStore(target))}
            except Exception as failed:  # the file system behind the target may raise anything
                answer = {"error": str(failed) or repr(failed)}
            self._answer(name, answer)

        return save

    def _answer(self, name: str, answer: dict[str, Any]) -> None:
        """Say what became of a request. The topology does not end because that cannot be said."""
        try:
            self._store.write(f"{name.removesuffix('.json')}.done", json.dumps(answer).encode())
            self._store.remove(name)
            self._seen.discard(name)
        except StateError as error:
            log.warning("no answer to %s: %s", name, error)


def save_newest(store: StateStore, target: StateStore) -> int:
    """Copy the newest committed epoch to a savepoint. What sinks prepared for it has been published and stays
    behind. Raises ``StateError`` where nothing was committed."""
    newest = manifests.newest(store)
    if newest is None:
        raise StateError(f"state directory {store.url}", "holds a committed epoch", "none")
    tasks = {key: TaskEntry(entry.parts, []) for key, entry in newest.tasks.items()}
    manifests.copy(store, replace(newest, tasks=tasks), target)
    return newest.epoch
