"""Puts tuples that a marker has overtaken in an earlier query run into the inboxes of the tasks that process them.

The number of tasks may have changed. ``driver.overtaken`` tells the rule by which a tuple finds its task then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import pyarrow as pa

from penstock.control.segments import waiting_position
from penstock.frames import codec
from penstock.frames.header import HEADER_BYTES, UNNUMBERED, Header, unpack
from penstock.plan.model import LOCAL, Edge, Plan, WorkerId
from penstock.protocol.task_states import WaitingTuples
from penstock.state.snapshots import SnapshotPart
from penstock.topology.groupings import Fields, Global, PartialKey, Router, Targets
from penstock.worker.inbox import Inbox
from penstock.worker.outputs import select_rows
from penstock.worker.overtaking import StoredFrame
from penstock.worker.parcel import Parcel

_BY_VALUE = (Fields, PartialKey, Global)


class _Frame(NamedTuple):
    """A stored frame in the numbers of this query run."""

    header: Header
    content: pa.Buffer
    executed: int
    waited_at: int
    """Index of the task for which it waited."""
    number: int
    """Its place among the frames for its component."""


class WaitingFrames:
    """Distributes stored frames to the tasks of one worker. Every worker that runs tasks of a component with
    another number of tasks reads the same frames in the same order, so all of them come to the same division."""

    def __init__(
        self, id: WorkerId, plan: Plan, waiting: WaitingTuples, inboxes: Mapping[int, Inbox], generation: int = 0
    ) -> None:
        """``generation``: that of this query run."""
        self._position = waiting_position(generation)
        self._id, self._plan, self._waiting, self._inboxes = id, plan, waiting, inboxes
        self._routers: dict[tuple[int, str], Router] = {}
        self._schemas = [
            codec.declared_schema([(field.name, field.type) for field in stream.fields]) for stream in plan.streams
        ]

    def restore(self, read: Callable[[SnapshotPart], Iterator[StoredFrame]]) -> None:
        """Read all frames and put them into inboxes. Called once, before anything else can be in them. Raises what
        ``read`` raises."""
        frames: dict[str, int] = {}
        for key, part in self._waiting.parts:
            component, _, index = key.rpartition("/")
            for stored in read(part):
                number = frames.get(component, 0)
                frames[component] = number + 1
                self._restore(component, self._translated(stored, component, int(index), number))

    def _translated(self, stored: StoredFrame, component: str, index: int, number: int) -> _Frame:
        header, plan = unpack(memoryview(stored.frame)), self._plan
        sending, _, source = self._waiting.tasks[header.source_task].rpartition("/")
        senders = plan.tasks_of[sending]
        counts = component in plan.migratable  # their senders number their tuples anew
        sender = senders[int(source) % len(senders)]
        worker = plan.routes.worker_of[sender]
        header = header._replace(
            target_stage=self._id.stage,
            target_worker=self._id.index,
            source_stage=worker.stage,
            source_worker=worker.index,
            source_task=sender,
            stream=self._waiting.streams[header.stream],
            epoch=0,
            sequence=UNNUMBERED,
            range_offset=self._position if counts else 0,
            range_length=1 if counts else 0,
        )
        return _Frame(header, stored.frame, stored.executed, index, number)

    def _restore(self, component: str, frame: _Frame) -> None:
        tasks, before = self._plan.tasks_of[component], self._waiting.before[component]
        edge = next(edge for edge in self._plan.edges_from(frame.header.stream) if edge.target == component)
        if before == len(tasks):
            self._put_whole(frame, tasks[frame.waited_at])
        elif type(edge.grouping) in _BY_VALUE:
            self._put_by_value(frame, edge, tasks)
        elif type(edge.grouping) in LOCAL:
            self._put_evenly(frame, tasks)
        else:
            self._put_whole(frame, tasks[frame.waited_at % len(tasks)])

    def _put_whole(self, frame: _Frame, task: int) -> None:
        if frame.executed:
            self._put(frame, task, self._batch(frame))
        elif task in self._inboxes:
            header = frame.header._replace(target_task=task)
            content = pa.py_buffer(header.pack() + memoryview(frame.content)[HEADER_BYTES:])
            self._inboxes[task].offer(Parcel(header, content), beyond_limit=True)

    def _put_by_value(self, frame: _Frame, edge: Edge, tasks: tuple[int, ...]) -> None:
        router = self._routers.get((edge.stream, edge.target))
        if router is None:
            router = self._routers[edge.stream, edge.target] = edge.grouping.router(Targets(tasks))
        batch = self._batch(frame)
        for position, rows in router.split(batch):
            self._put(frame, tasks[position], select_rows(batch, rows))

    def _put_evenly(self, frame: _Frame, tasks: tuple[int, ...]) -> None:
        """Each task gets the same number of tuples, which stay in order. The first part goes to another task each
        time, because a frame may have fewer tuples than there are tasks."""
        batch, count = self._batch(frame), len(tasks)
        for part in range(count):
            begin, end = batch.num_rows * part // count, batch.num_rows * (part + 1) // count
            self._put(frame, tasks[(part + frame.number) % count], batch.slice(begin, end - begin))

    def _batch(self, frame: _Frame) -> pa.RecordBatch:
        """The tuples of a frame that are not executed yet."""
        batch = codec.decode(frame.header, frame.content, self._schemas[frame.header.stream])
        return batch.slice(frame.executed)

    def _put(self, frame: _Frame, task: int, batch: pa.RecordBatch) -> None:
        """Put tuples of the frame into the task's inbox, if this worker runs it."""
        inbox = self._inboxes.get(task)
        if inbox is None or not batch.num_rows:
            return
        header = frame.header._replace(target_task=task)
        content = pa.py_buffer(codec.encode(header, batch, self._schemas[header.stream]))
        inbox.offer(Parcel(header._replace(rows=batch.num_rows), content), beyond_limit=True)
