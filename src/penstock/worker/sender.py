"""Sends the output of tasks to other tasks: as numbered frames to other workers, as parcels inside the worker."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from penstock.acking.lineage import Lineage
from penstock.control.segments import SourceRange
from penstock.frames import codec
from penstock.frames.header import Header, Kind
from penstock.plan.model import Plan, WorkerId
from penstock.worker.flow_control import FlowControl
from penstock.worker.intake import Intake
from penstock.worker.outputs import Send
from penstock.worker.parcel import Parcel
from penstock.worker.tracking import Ancestry


class StreamCounts(dict[tuple[int, int], list[int]]):
    """⟨Sending task, receiving task⟩ → tuples and bytes sent so far. If both tasks are in this worker, the bytes
    are those in memory."""

    def add(self, source: int, target: int, tuples: int, size: int) -> None:
        """Called once per frame or parcel."""
        count = self.get((source, target))
        if count is None:
            count = self[source, target] = [0, 0]
        count[0] += tuples
        count[1] += size


class FrameSender:
    """Sends and counts the tuples that the tasks of one worker emit. Used by the worker's loop only."""

    def __init__(self, id: WorkerId, plan: Plan, intake: Intake, flow: FlowControl) -> None:
        self.frames_sent = 0
        """Frames sent to other workers."""
        self.route_version = plan.routes.version
        """The version of the migration routes. The header of every frame contains it."""
        self._id, self._intake, self._flow = id, intake, flow
        self._worker_of = dict(plan.routes.worker_of)
        self._schemas = [
            codec.declared_schema([(f.name, f.type) for f in stream.fields]) for stream in plan.streams
        ]
        self._sequence: dict[tuple[int, int, int], int] = {}
        """⟨Sending task, receiving task, stream⟩ → the number of the next frame."""
        self._streams = StreamCounts()

    def of_task(self, source_task: int) -> Send:
        """Make the function with which the outputs of a task send tuples. They call it once per frame."""
        worker_of, inboxes, alignment = self._worker_of, self._intake.inboxes, self._intake.alignment

        def send(
            stream: int,
            task: int,
            batch: pa.RecordBatch,
            born: float,
            lineage: Ancestry | None,
            source: SourceRange | None,
        ) -> int:
            id, target = self._id, worker_of[task]
            header = Header(Kind.DATA, target.stage, target.index, id.stage, id.index, task, source_task, stream)
            if target == id:
                inboxes[task].put(Parcel(header._replace(rows=batch.num_rows, born=born), batch, lineage))
                self._streams.add(source_task, task, batch.num_rows, int(batch.nbytes))
                return int(batch.nbytes)
            key = (source_task, task, stream)
            sequence = self._sequence.get(key, 0)
            self._sequence[key] = sequence + 1
            header = header._replace(born=born, sequence=sequence, route=self.route_version, epoch=alignment.epoch)
            if source is not None:
                header = header._replace(range_length=source.length, range_offset=source.offset)
            packed = lineage.pack() if isinstance(lineage, Lineage) else b""  # flights never leave their worker
            frame = codec.encode(header, batch, self._schemas[stream], packed)
            self.frames_sent += 1
            self._flow.send_queue(source_task, task).send(header._replace(rows=batch.num_rows), frame)
            self._streams.add(source_task, task, batch.num_rows, len(frame))
            return len(frame)

        return send

    def count(self, source: int, target: int, tuples: int, size: int) -> None:
        """Count tuples that were passed on inside the worker. Called once per parcel and sending task."""
        self._streams.add(source, target, tuples, size)

    def streams(self) -> list[tuple[int, int, int, int]]:
        """Sending task, receiving task, tuples and bytes so far."""
        return [(*pair, *count) for pair, count in self._streams.items()]  # type: ignore[misc] # two and two

    # ---- moving to another process ---------------------------------------------------------------------

    def sequence(self) -> list[tuple[int, int, int, int]]:
        """Sending task, receiving task, stream, and the number of the next frame."""
        return [(*key, number) for key, number in self._sequence.items()]

    def restore(
        self,
        frames_sent: int,
        streams: Iterable[tuple[int, int, int, int]],
        sequence: Iterable[tuple[int, int, int, int]],
    ) -> None:
        """Continue from the counts and frame numbers of the process that ran the worker before."""
        self.frames_sent += frames_sent
        for source, target, tuples, size in streams:
            self._streams.add(source, target, tuples, size)
        for source, target, stream, number in sequence:
            self._sequence[source, target, stream] = number
