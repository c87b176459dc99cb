"""The boards tasks leave messages and states on (A figures 6 and 7, table 2), and the one inside the coordinator.

A task posts; a create-handler brings the message to ``/taskmessage``; a delete-handler at the target takes it
down and hands it to the trigger queue (``received``); what the target then does about it goes to ``/taskstate``,
which all watch (``changed``). Here the boards are two tables in the coordinator, and the control connections bring
and fetch; ``zookeeper`` has the other implementation.
"""

from __future__ import annotations

import importlib.util
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping
from urllib.parse import quote

from penstock.control.signals import TaskMessage, TaskState
from penstock.coordinator.client import ControlClient
from penstock.coordinator.messages import JoinBoards, Message
from penstock.errors import EnvironmentFault, SettingError
from penstock.plan.model import SlotId

log = logging.getLogger("penstock.coordinator")

MOST_WAITING = 10_000
"""Messages; a slot sends a hundred a second when it sends many, so this is an outage of minutes."""

Received = Callable[[TaskMessage], None]
Changed = Callable[[TaskState], None]


class Board(ABC):
    """A slot's view of the boards. Nothing here blocks the caller, and any thread may call it.

    ``received`` is called once for each message to a task of this slot, in order for each ⟨source, target⟩; the
    message is then off the board. ``changed`` is called with the newest state of a task whenever there is one, the
    slot's own included; a state that is replaced at once may never be seen. Both are called from threads of the
    board's, perhaps before the constructor returns, and must be quick and not raise.

    Messages to a task whose slot is not there yet wait for it. Messages that cannot be sent wait too; of more than
    ``MOST_WAITING`` only the newest of each ⟨source, target, subject⟩ is kept, which is enough: see ``Waiting``.
    """

    @abstractmethod
    def post(self, message: TaskMessage) -> None:
        """Send a message to a task. One that cannot be sent now is sent later."""

    @abstractmethod
    def publish(self, state: TaskState) -> None:
        """Say what a task of this slot does; replaces what was said of the same task and component before."""

    @abstractmethod
    def close(self, moved: bool = False) -> None:
        """Leave the boards. What was posted before is still sent if that is possible at once; what comes from now
        on is ignored. ``moved``: another slot's board has the same tasks, and what is there for them is its."""


def open_board(
    url: str,
    run_id: str,
    tasks: Collection[int],
    received: Received,
    changed: Changed,
    control_client: ControlClient,
) -> Board:
    """The board that ``url`` names: ``coordinator``, or ``zookeeper://host:port[,host:port]/path``.

    ``run_id`` is one for each start of a query: messages of an earlier start must not reach this one."""
    if url == "coordinator":
        return CoordinatorBoard(control_client, received, changed)
    check_board(url)
    from penstock.coordinator.zookeeper import ZooKeeperBoard

    hosts, path = parse_url(url)
    return ZooKeeperBoard(hosts, f"{path}/{quote(run_id, safe='')}", tasks, received, changed)


def check_board(url: str, flow: str = "step") -> None:
    """Raise what would keep the board from being opened, as far as that can be told without it: on the driver,
    before a topology starts."""
    if url == "coordinator":
        return
    parse_url(url)
    if flow == "credit":
        raise SettingError(
            "setting flow",
            "credit grants many times a second, more than ZooKeeper takes",
            f"board={url}",
            "Use flow=step, or board=coordinator.",
        )
    if importlib.util.find_spec("kazoo") is None:
        raise EnvironmentFault(
            f"board {url}",
            "the package kazoo talks to ZooKeeper",
            "but it is not installed",
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
            "setting board",
            "must be coordinator or zookeeper://host:port[,host:port]/path",
            repr(url),
            "An example: zookeeper://127.0.0.1:2181/penstock",
        )
    return hosts, "/" + "/".join(parts)


class Waiting:
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


class CoordinatorBoard(Board):
    """A slot's end of the boards in the coordinator: its control connection is both handlers."""

    def __init__(self, control: ControlClient, received: Received, changed: Changed) -> None:
        self._control = control
        control.listen(TaskMessage, received)
        control.listen(TaskState, changed)
        control.send_now(JoinBoards())

    def post(self, message: TaskMessage) -> None:
        self._control.send_now(message)

    def publish(self, state: TaskState) -> None:
        self._control.send_now(state)

    def close(self, moved: bool = False) -> None:
        self._control.listen(TaskMessage, _ignore)
        self._control.listen(TaskState, _ignore)


def _ignore(message: Message) -> None:
    pass


class Boards:
    """``/taskmessage`` and ``/taskstate`` in the coordinator, decided: ``take`` says what is to be told to whom.

    A message is on the board until the slot of its target has joined; it is deleted when it is given to that
    slot's connection. There is no confirmation, because nobody could make use of it: a lost connection ends the
    query, and the next start has boards of its own.
    """

    def __init__(self, slot_of: Mapping[int, SlotId]) -> None:
        self.messages: dict[SlotId, Waiting] = {}
        self.states: dict[tuple[int, str], TaskState] = {}
        self._slot_of = slot_of
        self._joined: set[SlotId] = set()

    def leave(self, slot: SlotId) -> None:
        """Another process is about to have the slot: what is for it waits until that has joined."""
        self._joined.discard(slot)

    def take(self, slot: SlotId, said: JoinBoards | TaskMessage | TaskState) -> list[tuple[SlotId, Message]]:
        """A slot says something."""
        if isinstance(said, JoinBoards):
            self._joined.add(slot)
            waiting = self.messages.pop(slot, Waiting())
            told: list[Message] = [*waiting.take(len(waiting)), *self.states.values()]
            return [(slot, each) for each in told]
        if isinstance(said, TaskState):
            self.states[said.task, said.towards] = said
            return [(joined, said) for joined in self._joined]
        owner = self._slot_of.get(said.target)
        if owner is None:
            log.error("slot %s posted to task %d, which does not exist", slot, said.target)
        elif owner in self._joined:
            return [(owner, said)]
        else:
            self.messages.setdefault(owner, Waiting()).append(said)
        return []
