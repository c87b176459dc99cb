"""Lines of files: a spout of its own, and a source for ``ReplaySpout``."""

from __future__ import annotations

import glob
import logging
import os
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from penstock.connectors.dead_letters import give_up
from penstock.connectors.lines import LineReader
from penstock.connectors.watermark import LowWater
from penstock.errors import EnvironmentFault, SettingError
from penstock.replay.eden import Eden
from penstock.replay.progress import ReadProgress
from penstock.storage.start_record import StartRecord
from penstock.topology.components import BatchSpout, BatchSpoutCollector, Conf, Context, Failure
from penstock.topology.streams import FieldSpec, OutputDeclarer

_log = logging.getLogger(__name__)
_BATCH = 4096  # lines emitted at a time: some 300 KB of text, a few frames


class _Lines:
    """Which files, from where, under which name: what spout and Eden have in common."""

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
        self.path = os.path.abspath(path)  # here on the driver: an executor's working folder is another
        self.start, self.follow = start, follow
        self.fields = tuple((field, str) if isinstance(field, str) else field for field in fields)

    def open(self, context: Context, positions: dict[str, int]) -> LineReader:
        """The reader of this task's share: file i of the sorted names belongs to task i mod tasks."""
        paths = sorted(glob.glob(self.path)) or ([self.path] if os.path.exists(self.path) else [])
        if not paths:
            raise EnvironmentFault(
                f"component '{context.component}', {self.where}",
                f"there is nothing at {self.path} on this node, where a task reads it",
                "Check the path; put the file there, or on a file system that all nodes share.",
            )
        share = paths[context.index :: context.parallelism]
        return LineReader(share, self._starts(context, share, positions), follow=self.follow)

    def _starts(self, context: Context, paths: Sequence[str], positions: dict[str, int]) -> dict[str, int]:
        """Where to begin in each file: as the state says, else as an earlier process of this task that crashed
        before its first commit, else as ``start`` says, which is durable on return."""
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

    The files are spread over the tasks: file i of the sorted names goes to task i mod tasks. So between runs that
    share a state, files may grow, but neither the set of files nor the parallelism should change: a file that
    moves to another task is read there from its start.

    A line ends with a newline; carriage returns before it are cut off, bytes that are not UTF-8 replaced.
    ``follow`` keeps reading files that grow, and reads one that got shorter anew; without it the spout is silent
    once it has come to the ends. ``start`` (``begin`` or ``end``) is for files never read before. At least once
    and exactly once the end that was found is durable before the first line is emitted.

    Exactly once the read position is part of each epoch. At least once the stored position is that of the first
    line not acked yet; a failed line is emitted again until it has had ``max_attempts`` in all; then it is a dead
    letter, which ``penstock dlq`` shows. To be able to send it back, use ``ReplaySpout(FileEden(path))``. At most
    once nothing is stored."""

    def __init__(
        self,
        path: str,
        *,
        start: str = "begin",
        follow: bool = False,
        fields: Sequence[FieldSpec] = ("line",),
        max_attempts: int = 5,
    ) -> None:
        self._lines = _Lines("FileSpout", path, start, follow, fields)
        self._max_attempts = max_attempts

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(*self._lines.fields)

    def open(self, conf: Conf, context: Context, collector: BatchSpoutCollector) -> None:
        self._context, self._collector = context, collector
        self._tracked = context.delivery == "at_least_once"
        self._positions = context.state.value("positions", {})
        self._reader = self._lines.open(context, self._positions.value)
        self._marks = LowWater(0)
        self._again: deque[int] = deque()
        self._attempts: dict[int, int] = {}

    def next_batch(self) -> None:
        if self._again:
            turn = [self._again.popleft() for _ in range(min(_BATCH, len(self._again)))]
            numbers = [number for number in turn if number >= self._marks.mark]  # else acked late
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
            return  # acked before
        attempts = self._attempts.get(msg_id, 0) + 1
        if attempts < self._max_attempts:
            self._attempts[msg_id] = attempts
            self._again.append(msg_id)
            return
        failure = Failure(failure.component, failure.error, attempts)
        if give_up(self._context, (self._reader.line(msg_id),), failure):
            self.ack_many((msg_id,))
        else:
            self._again.append(msg_id)

    def before_snapshot(self) -> None:
        self._positions.value = self._reader.positions(self._marks.mark if self._tracked else None)

    def after_commit(self) -> None:
        self._lines.record.on_committed()

    def close(self) -> None:
        self._reader.close()


class FileEden(Eden):
    """The lines of files as a source for ``ReplaySpout``; the arguments are those of ``FileSpout``, and so is
    the position in the task's state: one can take the other's place."""

    def __init__(
        self, path: str, *, start: str = "begin", follow: bool = False, fields: Sequence[FieldSpec] = ("line",)
    ) -> None:
        self._lines = _Lines("FileEden", path, start, follow, fields)
        self.fields = self._lines.fields

    def open(self, conf: Conf, context: Context) -> None:
        self._positions = context.state.value("positions", {})
        self._reader = self._lines.open(context, self._positions.value)
        self._progress = ReadProgress(0)

    def read(self, limit: int) -> list[tuple[int, tuple[Any, ...]]]:
        first, lines = self._reader.read(limit)
        end = first + len(lines)
        self._progress.read(range(first, end), end)
        return [(number, (line,)) for number, line in enumerate(lines.to_pylist(), first)]

    def done(self, positions: Iterable[int]) -> None:
        self._progress.done(positions)
        self._reader.forget(self._progress.position)

    def before_snapshot(self) -> None:
        self._positions.value = self._reader.positions(self._progress.position)

    def after_commit(self) -> None:
        self._lines.record.on_committed()

    def close(self) -> None:
        self._reader.close()
