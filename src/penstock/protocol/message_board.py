"""The message board, on which tasks post messages and states for each other (Lu 2020, figures 6 and 7, table 2).

A task posts a message, and a create handler writes it to ``/taskmessage``. A delete handler at the target
removes it and passes it to ``on_message``. The target then publishes its new state in ``/taskstate``, which all
workers watch (``on_state``). There are two implementations: tables in the driver (``driver.message_board``),
which workers use over their control connections, and ZooKeeper (``worker.zookeeper_board``).
"""

from __future__ import annotations

import importlib.util
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.errors import EnvironmentFault, SettingError

log = logging.getLogger("penstock.message_board")

MOST_WAITING = 10_000
"""Unsent messages that are kept in full. A busy worker sends about a hundred a second, so this covers an outage
of more than a minute."""

OnMessage = Callable[[TaskMessage], None]
OnState = Callable[[TaskFlowState], None]


class MessageBoard(ABC):
    """A worker's connection to the message board. Any thread may call its methods; ``post`` and ``publish`` do
    not block.

    ``on_message`` is called once for each message to a task of this worker, in order for each ⟨source, target⟩;
    the message is then removed from the board. ``on_state`` is called with the newest state of a task whenever
    it changes, including the worker's own tasks; a state that is replaced quickly may be skipped. The board
    calls both on its own threads, possibly before its constructor returns. They must be quick and not raise.

    Messages to a task wait until its worker is connected. Messages that cannot be sent wait too;
    ``UnsentMessages`` says which are kept if there are more than ``MOST_WAITING``.
    """

    @abstractmethod
    def post(self, message: TaskMessage) -> None:
        """Send a message to a task. If it cannot be sent now, it is sent later."""

    @abstractmethod
    def publish(self, state: TaskFlowState) -> None:
        """Publish the state of a task of this worker. It replaces the previous state for the same task and
        component."""

    @abstractmethod
    def close(self, moved: bool = False) -> None:
        """Disconnect from the board. Posted messages are still sent if that is possible at once; arriving
        messages are ignored. ``moved``: the tasks now belong to another worker, and their messages and states
        stay on the board."""


def check_message_board(url: str, flow: str = "step") -> None:
    """Check the settings of the message board without connecting to it. The driver calls this before a topology
    starts. Raises ``SettingError`` or ``EnvironmentFault``."""
    if url == "coordinator":
        return
    parse_url(url)
    if flow == "credit":
        raise SettingError(
            "setting flow.mode",
            f"credit mode sends grants many times a second, which is too often for ZooKeeper (flow.board={url})",
            "Use --set flow.mode=step, or flow.board=coordinator.",
        )
    if importlib.util.find_spec("kazoo") is None:
        raise EnvironmentFault(
            f"message board {url}",
            "the package kazoo is not installed",
            'Install it with: pip install "penstock[zookeeper]".',
        )


def parse_url(url: str) -> tuple[str, str]:
    """Hosts and path from the URL of a message board on ZooKeeper. Raises ``SettingError`` if it is not one."""
    scheme, _, rest = url.partition("://")
    hosts, _, path = rest.partition("/")
    addresses = [host.rpartition(":") for host in hosts.split(",")]
    fits = all(host and port.isdecimal() and 0 < int(port) < 65536 for host, _, port in addresses)
    parts = path.removesuffix("/").split("/")
    if scheme != "zookeeper" or not fits or any(part in ("", ".", "..") for part in parts):
        raise SettingError(
            "setting flow.board",
            f"{url!r} is neither coordinator nor zookeeper://host:port[,host:port]/path",
            "For example zookeeper://127.0.0.1:2181/penstock.",
        )
    return hosts, "/" + "/".join(parts)


class UnsentMessages:
    """Messages that wait to be sent, oldest first. Not thread-safe.

    If there are more than ``most``, only the newest of each ⟨source, target, subject⟩ is kept. The others are
    not needed: the value of ``slow``, ``cancel`` and ``grant`` is a total, not a difference, and of ``hold`` and
    ``resume``, and of ``wait`` and ``proceed``, only the last one matters. Dropping the oldest messages instead
    could lose a ``cancel`` and slow down the target for ever.
    """

    def __init__(self, most: int = MOST_WAITING) -> None:
        self._messages: deque[TaskMessage] = deque()
        self._most = self._limit = most

    def __len__(self) -> int:
        return len(self._messages)

    def append(self, message: TaskMessage) -> None:
        self._messages.append(message)
        if len(self._messages) > self._limit:
            newest: dict[tuple[int, int, str], TaskMessage] = {}
            for each in self._messages:
                about = (each.source, each.target, each.subject)
                newest.pop(about, None)
                newest[about] = each
            log.error("%d task messages wait to be sent; %d are kept", len(self._messages), len(newest))
            self._messages = deque(newest.values())
            self._limit = max(self._most, 2 * len(newest))  # do not repeat this for every message

    def take(self, most: int) -> list[TaskMessage]:
        """Remove and return the oldest messages, at most ``most``."""
        return [self._messages.popleft() for _ in range(min(most, len(self._messages)))]
