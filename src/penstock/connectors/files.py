"""A spout that reads lines of files."""

from __future__ import annotations

import glob
import logging
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.connectors.dead_letters import give_up
from penstock.connectors.lines import LineReader
from penstock.connectors.watermark import LowWater
from penstock.errors import EnvironmentFault, SettingError
from penstock.storage.start_record import StartRecord
from penstock.topology.components import BatchSpout, BatchSpoutCollector, Conf, Context, Failure
from penstock.topology.streams import FieldSpec, OutputDeclarer

_log = logging.getLogger(__name__)
_BATCH = 4096  # lines emitted at a time: about 300 KB of text, a few frames


class LineFiles:
    """The settings and checks that the spout and the Eden have in common: files, starting point, field."""

    def __init__(self, where: str, path: str, start: str, follow: bool, fields: Sequence[FieldSpec]) -> None:
        if start not in ("begin", "end"):
            raise SettingError(
                f"{where}(start)",
                f"{start!r} is neither begin nor end",
                "It applies to files that were never read before.",
            )
        if len(fields) != 1:
            raise SettingError(
                f"{where}(fields)",
                f"a line is one field, but {len(fields)} are declared",
                "Split lines in a bolt.",
            )
        self.where = where
        self.path = os.path.abspath(path)  # resolved on the driver: executors have another working directory
        self.start, self.follow = start, follow
        self.fields = tuple((field, str) if isinstance(field, str) else field for field in fields)

    def find(self, context: Context, positions: dict[str, int]) -> dict[str, int]:
        """The files of this task's share, each with the offset at which it starts: file i of the sorted names
        belongs to task i mod parallelism."""
        paths = sorted(glob.glob(self.path)) or ([self.path] if os.path.exists(self.path) else [])
        if not paths:
            raise EnvironmentFault(
                f"component '{context.component}', {self.where}",
                f"there is nothing at {self.path} on this node, where a task reads it",
                "Check the path; put the file there, or on a file system that all nodes share.",
            )
        share = paths[context.index :: context.parallelism]
        starts = self._starts(context, share, positions)
        return {path: starts.get(path, 0) for path in share}

    def _starts(self, context: Context, paths: Sequence[str], positions: dict[str, int]) -> dict[str, int]:
        """The start offset of each file. Taken from the task's state, else from the record of an earlier process
        that crashed before its first commit, else from ``start``; in the last case it is durable on return."""
        self.record = StartRecord(context)
        unread = [path for path in paths if path not in positions]
        if self.start == "begin" or not unread:
            return positions
        kept = self.record.load()
        starts = {path: kept.get(path, os.path.getsize(path)) for path in unread}
        if starts != kept:
            self.record.keep(starts)
        return {**positions, **starts}


class FileSpout(BatchSpout):
    """Emits the lines of a file, or of all files that match a pattern such as ``/logs/*.txt``, in order per file.

    The files are distributed over the tasks: file i of the sorted names goes to task i mod parallelism. Between
    runs that share a state directory files may grow, but neither the set of files nor the parallelism should
    change: a task reads a file that is new to it from the beginning.

    A line ends with a newline. Carriage returns before it are removed; bytes that are not UTF-8 are replaced. With
    ``follow`` the spout keeps reading files that grow, and starts again at the beginning of a file that became
    shorter; without it the spout emits nothing more after the ends of all files. ``start`` (``begin`` or ``end``)
    applies to files that were never read before. With at-least-once and exactly-once delivery the end that was
    found is stored durably before the first line is emitted.

    With exactly-once delivery the read position is part of each epoch. With at-least-once delivery the stored
    position is that of the first line not yet acked; a failed line is emitted again until it has had
    ``max_attempts`` attempts, and then becomes a dead letter (``penstock dlq``). Use
    ``ReplaySpout(FileEden(path))`` to be able to send dead letters back. With at-most-once delivery no position is
    stored.
    """

    def __init__(
        self,
        path: str,
        *,
        start: str = "begin",
        follow: bool = False,
        fields: Sequence[FieldSpec] = ("line",),
        max_attempts: int = 5,
    ) -> None:
        self._lines = LineFiles("FileSpout", path, start, follow, fields)
        self._max_attempts = max_attempts

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(*self._lines.fields)

    def open(self, conf: Conf, context: Context, collector: BatchSpoutCollector) -> None:
        self._context, self._collector = context, collector
        self._tracked = context.delivery == "at_least_once"
        self._positions = context.state.value("positions", {})
        self._reader = LineReader(self._lines.find(context, self._positions.value), follow=self._lines.follow)
        self._marks = LowWater(0)
        self._retries: deque[int] = deque()
        self._attempts: dict[int, int] = {}

    def next_batch(self) -> None:
        if self._retries:
            due = [self._retries.popleft() for _ in range(min(_BATCH, len(self._retries)))]
            numbers = [number for number in due if number >= self._marks.mark]  # skip lines acked meanwhile
            self._collector.emit_batch([[self._reader.line(number) for number in numbers]], msg_ids=numbers)
            return
        first, lines = self._reader.read(_BATCH)
        if not len(lines):
            return
        if self._tracked:
            self._marks.add(first, len(lines))
            self._collector.emit_batch([lines], msg_ids=range(first, first + len(lines)))
        else:
            self._collector.emit_batch([lines])
            self._reader.forget(first + len(lines))

    def ack(self, msg_id: Any) -> None:
        self.ack_many((msg_id,))

    def ack_many(self, msg_ids: Sequence[Any]) -> None:
        self._marks.ack(np.asarray(msg_ids, np.int64))
        if self._attempts:
            for number in msg_ids:
                self._attempts.pop(number, None)
        self._reader.forget(self._marks.mark)

    def fail(self, msg_id: Any, failure: Failure) -> None:
        if msg_id < self._marks.mark:
            return  # acked already
        attempts = self._attempts.get(msg_id, 0) + (not failure.handed_on)
        if attempts < self._max_attempts:
            self._attempts[msg_id] = attempts
            self._retries.append(msg_id)
            return
        failure = Failure(failure.component, failure.error, attempts)
        if give_up(self._context, (self._reader.line(msg_id),), failure):
            self.ack_many((msg_id,))
        else:
            self._retries.append(msg_id)

    def before_snapshot(self) -> None:
        self._positions.value = self._reader.positions(self._marks.mark if self._tracked else None)

    def after_commit(self) -> None:
        self._lines.record.on_committed()

    def close(self) -> None:
        self._reader.close()
