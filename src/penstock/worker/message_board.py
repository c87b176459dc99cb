"""Connects a worker to the message board."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol
from urllib.parse import quote

from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.protocol.events import JoinMessageBoard
from penstock.protocol.message_board import MessageBoard, OnMessage, OnState, check_message_board, parse_url


class Control(Protocol):
    """The methods of a control connection that ``CoordinatorMessageBoard`` uses."""

    def send_now(self, event: Any) -> None: ...

    def listen(self, kind: type[Any], listener: Callable[[Any], None]) -> None: ...


def open_message_board(
    url: str,
    run_id: str,
    tasks: Collection[int],
    on_message: OnMessage,
    on_state: OnState,
    control: Control,
) -> MessageBoard:
    """Connect to the message board with this ``url``: ``coordinator``, or
    ``zookeeper://host:port[,host:port]/path``.

    ``run_id`` is different for each query run, so that messages of an earlier run do not reach this one. Raises
    ``SettingError`` or ``EnvironmentFault`` as ``check_message_board`` does."""
    if url == "coordinator":
        return CoordinatorMessageBoard(control, on_message, on_state)
    check_message_board(url)
    from penstock.worker.zookeeper_board import ZooKeeperMessageBoard

    hosts, path = parse_url(url)
    return ZooKeeperMessageBoard(hosts, f"{path}/{quote(run_id, safe='')}", tasks, on_message, on_state)


class CoordinatorMessageBoard(MessageBoard):
    """A worker's connection to the message board in the driver's coordinator. Messages and states are sent and
    received over the worker's control connection."""

    def __init__(self, control: Control, on_message: OnMessage, on_state: OnState) -> None:
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


def _ignore(message: TaskMessage | TaskFlowState) -> None:
    pass
