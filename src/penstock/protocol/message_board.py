"""The message board: where tasks leave messages and states for each other (Lu 2020, figures 6 and 7, table 2).

A task posts a message; a create-handler brings it to ``/taskmessage``; a delete-handler at the target takes it
down and hands it over (``on_message``); what the target then does about it goes to ``/taskstate``, which all watch
(``on_state``). There are two implementations: tables in the coordinator (``driver.message_board``), which control
connections bring and fetch, and ZooKeeper (``worker.zookeeper_board``).
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
"""Messages; a worker sends a hundred a second when it sends many, so this is an outage of minutes."""

OnMessage = Callable[[TaskMessage], None]
OnState = Callable[[TaskFlowState], None]


class MessageBoard(ABC):
    """A worker's view of the message boards. Nothing here blocks the caller, and any thread may call it.

    ``on_message`` is called once for each message to a task of this worker, in order for each ⟨source, target⟩;
    the message is then off the board. ``on_state`` is called with the newest state of a task whenever there is
    one, the worker's own included; a state that is replaced at once may never be seen. Both are called from
    threads of the board's, perhaps before the constructor returns, and must be quick and not raise.

    Messages to a task whose worker is not there yet wait for it. Messages that cannot be sent wait too; of more
    than ``MOST_WAITING`` only the newest of each ⟨source, target, subject⟩ is kept, which is enough: see
    ``UnsentMessages``.
    """

    @abstractmethod
    def post(self, message: TaskMessage) -> None:
        """Send a message to a task. One that cannot be sent now is sent later."""

    @abstractmethod
    def publish(self, state: TaskFlowState) -> None:
        """Say what a task of this worker does; replaces what was said of the same task and component before."""

    @abstractmethod
    def close(self, moved: bool = False) -> None:
        """Leave the message boards. What was posted before is still sent if that is possible at once; what comes
        from now on is ignored. ``moved``: another worker's board has the same tasks, and what is there for them is
        its."""


def check_message_board(url: str, flow: str = "step") -> None:
    """Raise what would keep the board from being opened, as far as that can be told without it: on the driver,
    before a topology starts."""
    if url == "coordinator":
        return
    parse_url(url)
    if flow == "credit":
        raise SettingError(
            "setting flow.mode",
            f"credit grants many times a second, which is too often for ZooKeeper (flow.board={url})",
            "Use --set flow.mode=step, or flow.board=coordinator.",
        )
    if importlib.util.find_spec("kazoo") is None:
        raise EnvironmentFault(
            f"board {url}",
            "the package kazoo is not installed",
            'Install it with: pip install "penstock[zookeeper]".',
        )


def parse_url(url: str) -> tuple[str, str]:
    """Hosts and path of a ZooKeeper board. Raises ``SettingError`` for anything else."""
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
    """Messages that cannot go yet, oldest first.

    Of more than ``most`` only the newest of each ⟨source, target, subject⟩ stays. That loses nothing that matters:
    the value of ``slow``, ``cancel`` and ``grant`` is a total, not a difference, and of ``hold`` and ``resume``,
    and of ``wait`` and ``proceed``, the last one holds. To drop the oldest instead could lose a ``cancel`` and
    leave the target slow for ever.
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
            log.error("%d task messages cannot be sent; %d are kept", len(self._messages), len(newest))
            self._messages = deque(newest.values())
            self._limit = max(self._most, 2 * len(newest))  # so that with many senders not each message leads here

    def take(self, most: int) -> list[TaskMessage]:
        """Remove the oldest, up to ``most``."""
        return [self._messages.popleft() for _ in range(min(most, len(self._messages)))]
