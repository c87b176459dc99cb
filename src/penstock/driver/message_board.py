"""The driver's side of the message board: stores task messages and task states, and decides which workers receive
them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.plan.model import WorkerId
from penstock.protocol.events import JoinMessageBoard
from penstock.protocol.message_board import UnsentMessages

log = logging.getLogger("penstock.driver")

Signal = TaskMessage | TaskFlowState


class MessageBoardTables:
    """The tables ``/taskmessage`` and ``/taskstate``. Does no IO: ``handle`` returns the messages to send. Not
    thread-safe.

    A message stays on the board until the worker of its target task has joined, and is removed when it is passed
    to that worker's connection. Workers do not confirm messages: a lost connection ends the query run, and the
    next query run has a new message board.
    """

    def __init__(self, worker_of: Mapping[int, WorkerId]) -> None:
        self.messages: dict[WorkerId, UnsentMessages] = {}
        self.states: dict[tuple[int, str], TaskFlowState] = {}
        self._worker_of = worker_of
        self._joined: set[WorkerId] = set()

    def detach(self, worker: WorkerId) -> None:
        """Keep messages for a worker that moves to another process, until the new process has joined."""
        self._joined.discard(worker)

    def handle(
        self, worker: WorkerId, message: JoinMessageBoard | TaskMessage | TaskFlowState
    ) -> list[tuple[WorkerId, Signal]]:
        """Handle an event of a worker. Returns the messages to send, each with its receiver."""
        if isinstance(message, JoinMessageBoard):
            self._joined.add(worker)
            waiting = self.messages.pop(worker, UnsentMessages())
            waiting_messages: list[Signal] = [*waiting.take(len(waiting)), *self.states.values()]
            return [(worker, each) for each in waiting_messages]
        if isinstance(message, TaskFlowState):
            self.states[message.task, message.towards] = message
            return [(joined, message) for joined in self._joined]
        owner = self._worker_of.get(message.target)
        if owner is None:
            log.error("worker %s sent a message to task %d, which does not exist", worker, message.target)
        elif owner in self._joined:
            return [(owner, message)]
        else:
            self.messages.setdefault(owner, UnsentMessages()).append(message)
        return []
