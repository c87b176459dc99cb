"""The message board in the coordinator: two tables, and who is to be told what."""

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
    ) -> list[tuple[WorkerId, Signal]]:
        """A worker says something."""
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
            log.error("worker %s posted to task %d, which does not exist", worker, message.target)
        elif owner in self._joined:
            return [(owner, message)]
        else:
            self.messages.setdefault(owner, UnsentMessages()).append(message)
        return []
