"""The message board on ZooKeeper, for flow control that does not depend on the driver (Lu 2020, figure 6).

A run uses these nodes below its path:

- ``taskmessage/TARGET/SENDER:NUMBER:SOURCE:KIND:VALUE``, persistent: a message. Its content is in its name, so
  that one list of children reads all messages. The name is unique, so that a create whose answer was lost can be
  repeated. If the first create succeeded and its node has been read and deleted meanwhile, the message arrives
  twice; the receiver recognizes it by its number.
- ``taskstate/TASK-COMPONENT``, persistent: the newest state, as JSON. A set names the previous version, so that
  a set that was delayed in a broken connection cannot overwrite a newer state.
- ``members``, with an ephemeral node for each connected board. A run without members is over.

kazoo connects, opens a new session after one was lost, and renews the watches.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
import uuid
from collections.abc import Collection
from functools import partial
from urllib.parse import quote

from kazoo.client import KazooClient, KazooState
from kazoo.exceptions import (
    BadVersionError,
    ConnectionClosedError,
    ConnectionLoss,
    KazooException,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    SessionExpiredError,
)
from kazoo.interfaces import IAsyncResult
from kazoo.recipe.cache import TreeCache, TreeEvent
from kazoo.recipe.party import Party
from kazoo.retry import ForceRetryError, KazooRetry, RetryFailedError

from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.protocol.message_board import MessageBoard, OnMessage, OnState, UnsentMessages
from penstock.texts import parse_json

log = logging.getLogger("penstock.driver")

SESSION_SECONDS = 6.0
"""Seconds without contact after which a session ends. kazoo leaves a server that is silent for two thirds of
this; a lost session costs little, so it is short."""
OLD_SECONDS = 86_400.0
"""Seconds between the creation of a run without members and of a new run, after which the new one removes the
old: a day, so that a run whose workers are all disconnected for a while is safe."""
_FIRST_RETRY, _LAST_RETRY = 0.05, 1.0
"""Seconds of the first and the longest pause between retries. kazoo's default would wait up to an hour for a
server that comes back."""
_AT_ONCE = 100
"""Messages in one transaction: a signal of an inbox to all its senders fits, far below ZooKeeper's limit of 1
MB."""
_FAREWELL_SECONDS = 1.0
"""Seconds that a closing board has to send waiting messages and to delete its nodes."""
_CLOSE_SECONDS = 2.0
"""Seconds that ``close`` waits at most. If the server hangs, the threads end later, within ``SESSION_SECONDS``."""
_MARK = b"penstock run"
"""Content of the node of a run. Nodes with other content are never removed."""


class ZooKeeperMessageBoard(MessageBoard):
    """A worker's connection to the message board on ZooKeeper. ``hosts`` are in kazoo's format; ``path`` is the
    node of the run.

    The create handler is a thread of this class; the delete handler runs on kazoo's threads. While no server
    answers, messages wait in memory."""

    def __init__(
        self,
        hosts: str,
        path: str,
        tasks: Collection[int],
        on_message: OnMessage,
        on_state: OnState,
        session: float = SESSION_SECONDS,
    ) -> None:
        self._path, self._tasks, self._on_message, self._on_state = path, tuple(tasks), on_message, on_state
        self._waiting = UnsentMessages()
        self._states: dict[tuple[int, str], TaskFlowState] = {}
        """States to be published."""
        self._work = threading.Condition()
        self._closing = self._moved = False
        self._sender = uuid.uuid4().hex[:12]
        self._numbers = itertools.count(1)
        self._known: set[str] = set()
        """Nodes of message targets that are known to exist."""
        self._versions: dict[str, int] = {}
        """ZooKeeper's version of each state that this board has published, by node."""
        self._reading = threading.Lock()
        self._read: dict[tuple[str, int], int] = {}
        """The number of the last message read from each ⟨sender, target⟩."""
        self._undeleted: set[str] = set()
        """Nodes of messages that have been read and are not known to be deleted."""
        self._joined = False
        self._retry = _retry()
        self._retry.interrupt = lambda: self._closing
        self._client = KazooClient(hosts, session, connection_retry=_retry(), command_retry=_retry())
        self._client.add_listener(self._connection_changed)
        self._members = Party(self._client, f"{path}/members")
        self._cache = TreeCache(self._client, f"{path}/taskstate")
        self._cache.listen(self._state_changed)
        self._client.start_async()
        self._thread = threading.Thread(target=self._run, name="board-create", daemon=True)
        self._thread.start()

    def post(self, message: TaskMessage) -> None:
        with self._work:
            self._waiting.append(message)
            self._work.notify()

    def publish(self, state: TaskFlowState) -> None:
        with self._work:
            self._states[state.task, state.towards] = state
            self._work.notify()

    def close(self, moved: bool = False) -> None:
        with self._work:
            if self._closing:
                return
            self._closing, self._moved = True, moved
            self._work.notify()
        closer = threading.Thread(target=self._stop, name="board-close", daemon=True)
        closer.start()
        closer.join(_CLOSE_SECONDS)

    def _stop(self) -> None:
        self._thread.join(_FAREWELL_SECONDS)
        self._cache.close()
        self._client.stop()  # also ends a create handler that waits for an answer
        self._client.close()

    # ---- the create handler ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._ready():
                self._open()
                while self._ready() or (self._pending and self._client.connected):
                    self._create_all()
                if self._client.connected:
                    self._leave()
        except (RetryFailedError, ConnectionClosedError, ConnectionLoss, SessionExpiredError):
            pass  # closed while no server answered
        except KazooException:
            log.exception("the message board at %s cannot be used", self._path)

    def _ready(self) -> bool:
        """Wait until there is work and a connection. Returns False when the board is closed."""
        with self._work:
            self._work.wait_for(lambda: self._closing or (self._client.connected and self._pending))
        return not self._closing

    @property
    def _pending(self) -> bool:
        return bool(not self._joined or self._waiting or self._states)

    def _open(self) -> None:
        try:
            self._retry(self._client.create, self._path, _MARK, makepath=True)
            self._sweep()
        except NodeExistsError:
            pass  # another worker has created it
        self._retry(self._client.ensure_path, f"{self._path}/taskstate")
        self._join()
        for task in self._tasks:
            node = self._target(task)
            self._client.ChildrenWatch(node, partial(self._receive, task, node))
        with contextlib.suppress(ConnectionLoss, SessionExpiredError):  # the cache starts with the next connection
            self._cache.start()

    def _join(self) -> None:
        self._joined = True  # set before joining, so that a session lost meanwhile sets it to False again
        self._members.join()

    def _sweep(self) -> None:
        """Remove old runs whose workers ended without closing their boards. Ages are measured by the server's
        clock."""
        client, retry = self._client, self._retry
        parent, _, own = self._path.rpartition("/")
        _, stat = retry(client.get, self._path)
        for run in set(retry(client.get_children, parent)) - {own}:
            other = f"{parent}/{run}"
            with contextlib.suppress(NoNodeError):  # it has just been removed
                mark, other_stat = retry(client.get, other)
                if mark == _MARK and stat.created - other_stat.created >= OLD_SECONDS:
                    members = retry(client.exists, f"{other}/members")
                    if members is None or not members.children_count:
                        retry(client.delete, other, recursive=True)

    def _target(self, task: int) -> str:
        """The node for messages to a task. Creates it if necessary."""
        node = f"{self._path}/taskmessage/{task}"
        if node not in self._known:
            self._retry(self._client.ensure_path, node)
            self._known.add(node)
        return node

    def _create_all(self) -> None:
        if not self._joined:
            self._join()
        with self._work:
            messages = self._waiting.take(_AT_ONCE)
            states, self._states = self._states, {}
        if messages:
            self._create(messages)
        for state in states.values():
            self._set(state)

    def _create(self, messages: list[TaskMessage]) -> None:
        nodes = [f"{self._target(message.target)}/{self._name(message)}" for message in messages]
        if len(nodes) > 1 and self._create_together(nodes):
            return
        for node in nodes:
            try:
                self._retry(self._client.create, node)
            except NodeExistsError:
                pass  # the previous attempt created it
            except NoNodeError:
                log.info("the target of message %s has left the board", node)

    def _create_together(self, nodes: list[str]) -> bool:
        """Create all nodes in one transaction. Returns False if none was created or the outcome is unknown."""
        transaction = self._client.transaction()
        for node in nodes:
            transaction.create(node)
        try:
            return not any(isinstance(result, Exception) for result in transaction.commit())
        except (ConnectionLoss, SessionExpiredError):
            return False

    def _name(self, message: TaskMessage) -> str:
        number = next(self._numbers)
        return f"{self._sender}:{number:010}:{message.source}:{message.kind}:{float(message.value)!r}"

    def _set(self, state: TaskFlowState) -> None:
        node = f"{self._path}/taskstate/{state.task}-{quote(state.towards, safe='')}"
        self._retry(self._try_set, node, json.dumps([state.task, state.towards, state.rate]).encode())

    def _try_set(self, node: str, data: bytes) -> None:
        try:
            if node in self._versions:
                self._versions[node] = self._client.set(node, data, self._versions[node]).version
            else:
                self._client.create(node, data)
                self._versions[node] = 0
        except (
            NodeExistsError,
            BadVersionError,
            NoNodeError,
        ):  # by an earlier attempt or another board
            stat = self._client.exists(node)
            if stat is None:
                self._versions.pop(node, None)
            else:
                self._versions[node] = stat.version
            raise ForceRetryError from None

    def _leave(self) -> None:
        """Delete the nodes of this worker's tasks, unless they have moved, and those of the run if no other
        worker is a member."""
        for task in () if self._moved else self._tasks:
            self._client.delete(self._target(task), recursive=True)
        for node in {} if self._moved else self._versions:
            with contextlib.suppress(NoNodeError):
                self._client.delete(node)
        self._members.leave()
        with contextlib.suppress(NotEmptyError, NoNodeError):
            for node in ("/members", "/taskstate", "/taskmessage", ""):
                self._client.delete(self._path + node)

    # ---- on kazoo's threads ----------------------------------------------------------------------------

    def _connection_changed(self, state: str) -> None:
        if state == KazooState.LOST:
            self._joined = False
        elif state == KazooState.CONNECTED:
            for node in list(self._undeleted):
                self._delete(node)
            with self._work:
                self._work.notify()

    def _receive(self, target: int, node: str, names: list[str]) -> None:
        """The delete handler: passes new messages to ``on_message`` and deletes their nodes."""
        with self._reading:
            for name in sorted(names):
                if self._closing:
                    return
                sender, number, source, kind, value = name.split(":")
                if int(number) > self._read.get((sender, target), 0):
                    self._read[sender, target] = int(number)
                    self._on_message(TaskMessage(int(source), target, kind, float(value)))
                self._delete_once(f"{node}/{name}")

    def _delete_once(self, node: str) -> None:
        if node not in self._undeleted:  # otherwise the deletion is already under way
            self._undeleted.add(node)
            self._delete(node)

    def _delete(self, node: str) -> None:
        self._client.delete_async(node).rawlink(partial(self._deleted, node))

    def _deleted(self, node: str, result: IAsyncResult) -> None:
        if result.successful() or isinstance(result.exception, NoNodeError):
            self._undeleted.discard(node)

    def _state_changed(self, event: TreeEvent) -> None:
        is_state = event.event_type in (TreeEvent.NODE_ADDED, TreeEvent.NODE_UPDATED) and event.event_data.data
        if is_state and not self._closing:
            self._on_state(TaskFlowState(*parse_json(event.event_data.data)))


def _retry() -> KazooRetry:
    return KazooRetry(max_tries=-1, delay=_FIRST_RETRY, max_delay=_LAST_RETRY)
