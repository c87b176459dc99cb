"""From a task's output to another task's input: tuples become numbered frames, or parcels inside the worker."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from penstock.acking.lineage import Lineage
from penstock.frames import codec
from penstock.frames.header import Header, Kind
from penstock.plan.model import Plan, WorkerId
from penstock.worker.flow_control import FlowControl
from penstock.worker.intake import Intake
from penstock.worker.outputs import Send
from penstock.worker.parcel import Parcel


class StreamCounts(dict[tuple[int, int], list[int]]):
    """Tuples and bytes so far by ⟨sender, receiver⟩, both tasks. Where both are in the worker, the bytes are those
    in memory."""

    def add(self, source: int, target: int, tuples: int, size: int) -> None:
        """Once for each frame."""
        count = self.get((source, target))
        if count is None:
            count = self[source, target] = [0, 0]
        count[0] += tuples
        count[1] += size


class FrameSender:
    """Sends what the tasks of one worker emit, and counts it. Used by the worker's loop only."""

    def __init__(self, id: WorkerId, plan: Plan, intake: Intake, flow: FlowControl) -> None:
        self.frames_sent = 0
        """To other workers."""
        self.route_version = plan.routes.version
        """Of the migration routes; every frame carries it."""
        self._id, self._intake, self._flow = id, intake, flow
        self._worker_of = dict(plan.routes.worker_of)
        self._schemas = [
            codec.declared_schema([(f.name, f.type) for f in stream.fields]) for stream in plan.streams
        ]
        self._sequence: dict[tuple[int, int, int], int] = {}
        """Of the next frame, by sender, receiver (tasks) and stream."""
        self._streams = StreamCounts()

    def of_task(self, source_task: int) -> Send:
        """What the outputs of a task send with: once for each frame."""
        worker_of, inboxes, alignment = self._worker_of, self._intake.inboxes, self._intake.alignment

        def send(stream: int, task: int, batch: pa.RecordBatch, born: float, lineage: Lineage | None) -> int:
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
            packed = b"" if lineage is None else lineage.pack()
            frame = codec.encode(header, batch, self._schemas[stream], packed)
            self.frames_sent += 1
            self._flow.send_queue(source_task, task).send(header._replace(rows=batch.num_rows), frame)
            self._streams.add(source_task, task, batch.num_rows, len(frame))
            return len(frame)

        return send

    def streams(self) -> list[tuple[int, int, int, int]]:
        """Sender, receiver (tasks), tuples and bytes so far."""
        return [(*pair, *count) for pair, count in self._streams.items()]  # type: ignore[misc] # two and two

    # ---- moving to another process ---------------------------------------------------------------------

    def sequence(self) -> list[tuple[int, int, int, int]]:
        """Sender, receiver, stream, and the number of the next frame."""
        return [(*key, number) for key, number in self._sequence.items()]

    def restore(
        self,
        frames_sent: int,
        streams: Iterable[tuple[int, int, int, int]],
        sequence: Iterable[tuple[int, int, int, int]],
    ) -> None:
        """Continue where another process stopped."""
        self.frames_sent += frames_sent
        for source, target, tuples, size in streams:
            self._streams.add(source, target, tuples, size)
        for source, target, stream, number in sequence:
            self._sequence[source, target, stream] = number
