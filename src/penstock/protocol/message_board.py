"""The message boards tasks leave messages and states on (A figures 6 and 7, table 2), and the one inside the
coordinator.

A task posts; a create-handler brings the message to ``/taskmessage``; a delete-handler at the target takes it
down and hands it to the trigger queue (``on_message``); what the target then does about it goes to ``/taskstate``,
which all watch (``on_state``). Here the message boards are two tables in the coordinator, and the control
connections bring and fetch; ``zookeeper`` has the other implementation.
"""

from __future__ import annotations

import importlib.util
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping
from urllib.parse import quote

from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.errors import EnvironmentFault, SettingError
from penstock.plan.model import WorkerId
from penstock.protocol.client import ControlClient
from penstock.protocol.messages import JoinMessageBoard, Message

log = logging.getLogger("penstock.driver")

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


def open_message_board(
    url: str,
    run_id: str,
    tasks: Collection[int],
    on_message: OnMessage,
    on_state: OnState,
    control_client: ControlClient,
) -> MessageBoard:
    """The board that ``url`` names: ``coordinator``, or ``zookeeper://host:port[,host:port]/path``.

    ``run_id`` is one for each start of a query: messages of an earlier start must not reach this one."""
    if url == "coordinator":
        return CoordinatorMessageBoard(control_client, on_message, on_state)
    check_message_board(url)
    from penstock.protocol.zookeeper_board import ZooKeeperMessageBoard

    hosts, path = parse_url(url)
    return ZooKeeperMessageBoard(hosts, f"{path}/{quote(run_id, safe='')}", tasks, on_message, on_state)


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


class CoordinatorMessageBoard(MessageBoard):
    """A worker's end of the message boards in the coordinator: its control connection is both handlers."""

    def __init__(self, control: ControlClient, on_message: OnMessage, on_state: OnState) -> None:
        self._control = control
        control.listen(TaskMessage, on_message)
        control.listen(TaskFlowState, on_state)
        control.send_now(JoinMessageBoard())

    def post(self, message: TaskMessage) -> None:
        self._control.send_now(message)

    def publish(self, state: TaskFlowState) -> None:
        self._control.send_now(state)

    def close(self, moved: bool = False) -> None:
        self._control.listen(TaskMessage, _ignore)
        self._control.listen(TaskFlowState, _ignore)


def _ignore(message: Message) -> None:
    pass


class MessageBoardTables:
    """``/taskmessage`` and ``/taskstate`` in the coordinator, decided: ``handle`` says what is to be told to whom.

    A message is on the board until the worker of its target has joined; it is deleted when it is given to that
    worker's connection. There is no confirmation, because nobody could make use of it: a lost connection ends the
    query, and the next start has boards of its own.
    """

    def __init__(self, worker_of: Mapping[int, WorkerId]) -> None:
        self.messages: dict[WorkerId, UnsentMessages] = {}
        self.states: dict[tuple[int, str], TaskFlowState] = {}
        self._worker_of = worker_of
        self._joined: set[WorkerId] = set()

    def detach(self, worker: WorkerId) -> None:
        """Another process is about to have the worker: what is for it waits until that has joined."""
        self._joined.discard(worker)

    def handle(
        self, worker: WorkerId, message: JoinMessageBoard | TaskMessage | TaskFlowState
    ) -> list[tuple[WorkerId, Message]]:
        """A worker says something."""
        if isinstance(message, JoinMessageBoard):
            self._joined.add(worker)
            waiting = self.messages.pop(worker, UnsentMessages())
            waiting_messages: list[Message] = [*waiting.take(len(waiting)), *self.states.values()]
            return [(worker, each) for each in waiting_messages]
        if isinstance(message, TaskFlowState):
            self.states[message.task, message.towards] = message
            return [(joined, message) for joined in self._joined]
        owner = self._worker_of.get(message.target)
        if owner is None:
            log.error("worker %s posted to task %d, which does not exist", worker, message.target)
        elif owner in self._joined:
            return [(owner, message)]
        else:
            self.messages.setdefault(owner, UnsentMessages()).append(message)
        return []
