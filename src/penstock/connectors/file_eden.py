"""Lines of files as a source for ``ReplaySpout``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.acking.lineage import I64
from penstock.connectors.files import LineFiles
from penstock.connectors.lines import BLOCK, LineFile, line_ends, split_lines
from penstock.replay.eden import Eden
from penstock.replay.progress import ReadProgress
from penstock.replay.records import ReplayRecord, lost
from penstock.topology.components import Conf, Context
from penstock.topology.streams import FieldSpec

_OFFSET_BITS = 44  # bits of a position for the byte in the file, 16 TB; the other 18 are the index of the content
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_AGAIN_BYTES = 8 << 20  # bytes read again at a time: little memory


class FileEden(Eden):
    """The lines of files as a source for ``ReplaySpout``. The arguments are those of ``FileSpout``. Both store
    their position in the same form, so one can replace the other.

    A failed line is read again from its file. If the file no longer has a line there, because somebody shortened
    or rewrote it, the line becomes a dead letter that says where it was. A file that is replaced under its name
    (``mv``) stays readable until the task ends. What cannot be noticed is a file whose bytes were overwritten
    with other lines that begin at the same places.
    """

    def __init__(
        self, path: str, *, start: str = "begin", follow: bool = False, fields: Sequence[FieldSpec] = ("line",)
    ) -> None:
        self._lines = LineFiles("FileEden", path, start, follow, fields)
        self.fields = self._lines.fields

    def open(self, conf: Conf, context: Context) -> None:
        self._positions = context.state.value("positions", {})
        files = self._lines.find(context, self._positions.value)
        self._contents = [
            _Content(LineFile(path, offset, self._lines.follow), offset) for path, offset in files.items()
        ]
        self._current = list(range(len(self._contents)))
        """For each file, the index of its content."""
        self._turn = 0
        """Index of the file to read next."""
        self._block = _LinesAhead(0, np.zeros(1, np.int64), pa.array([], pa.string()))

    def read(self, limit: int) -> list[tuple[int, tuple[Any, ...]]]:
        if not self._block.left:
            self._load()
        block = self._block
        starts, lines = block.take(limit)
        if not len(lines):
            return []
        self._contents[block.content].progress.read(starts[:-1], int(starts[-1]))
        positions = (starts[:-1] | block.content << _OFFSET_BITS).tolist()
        return [(position, (line,)) for position, line in zip(positions, lines.to_pylist(), strict=True)]

    def read_again(self, positions: I64) -> list[tuple[Any, ...] | ReplayRecord]:
        index = int(positions[0]) >> _OFFSET_BITS
        offsets = positions[positions >> _OFFSET_BITS == index] & _OFFSET_MASK  # the others are asked for next
        content = self._contents[index]
        found: list[tuple[Any, ...] | ReplayRecord] = []
        size, block = 0, _Bytes(content.file.descriptor)
        for offset in offsets.tolist():
            line = content.line(block, offset)
            if isinstance(line, str):
                found.append(lost(f"{content.file.path} byte {offset}", line))
            else:
                found.append((line.decode("utf-8", "replace").rstrip("\r\n"),))
                size += len(line)
            if size >= _AGAIN_BYTES:
                break
        return found

    def done(self, positions: I64) -> None:
        positions = np.asarray(positions, np.int64)
        contents = positions >> _OFFSET_BITS
        for index in np.unique(contents).tolist():
            self._contents[index].progress.done(positions[contents == index] & _OFFSET_MASK)

    def before_snapshot(self) -> None:
        contents = [self._contents[index] for index in self._current]
        self._positions.value = {each.file.path: each.progress.position for each in contents}

    def after_commit(self) -> None:
        self._lines.record.on_committed()

    def close(self) -> None:
        for index in self._current:
            self._contents[index].file.close()

    def _load(self) -> None:
        """Load the next block of the current file, or of the first later file that has one."""
        for _ in self._current:
            index = self._current[self._turn]
            content = self._contents[index]
            begin, data = content.file.read()
            if data and begin < content.progress.end:  # the file became shorter, and is read from its beginning
                content.is_gone = True
                self._contents.append(_Content(content.file, begin))
                index = self._current[self._turn] = len(self._contents) - 1
            if data:
                starts = begin + np.concatenate(([0], line_ends(data)))
                starts[-1] = content.file.offset  # a last line without a newline
                self._block = _LinesAhead(index, starts, split_lines(data))
                return
            self._turn = (self._turn + 1) % len(self._current)


@dataclass
class _Content:
    """What a file contains, until it becomes shorter and is read from its beginning."""

    file: LineFile
    start: int
    """Where reading began; no line need begin there."""
    is_gone: bool = False
    progress: ReadProgress = field(init=False)

    def __post_init__(self) -> None:
        self.progress = ReadProgress(self.start)

    def line(self, block: _Bytes, offset: int) -> bytes | str:
        """The line at an offset at which one was read; or a text that says why it is not there any more."""
        if self.is_gone:
            return "the file became shorter, and is read from its beginning"
        cuts = self.file.cuts
        if offset not in (0, self.start, *cuts) and block.at(offset - 1, 1) != b"\n":
            return "no line begins there any more"
        line = block.line(offset)
        for cut in cuts:
            if offset < cut <= offset + len(line):
                return line[: cut - offset]
        return line if line.endswith(b"\n") else "the file is shorter than before"


class _LinesAhead:
    """Lines that are read ahead."""

    def __init__(self, content: int, starts: I64, lines: pa.Array) -> None:
        """``starts``: where the lines begin, and the end of the last one."""
        self.content, self._starts, self._lines = content, starts, lines

    @property
    def left(self) -> int:
        return len(self._lines)

    def take(self, limit: int) -> tuple[I64, pa.Array]:
        """Up to ``limit`` lines, where they begin, and where the last one ends."""
        starts, lines = self._starts[: limit + 1], self._lines[:limit]
        self._starts, self._lines = self._starts[len(lines) :], self._lines[limit:]
        return starts, lines


class _Bytes:
    """Bytes of a file around the last ones that were asked for."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._begin, self._data = 0, b""

    def at(self, offset: int, count: int) -> bytes:
        """Up to ``count`` bytes; fewer at the end of the file."""
        if not self._begin <= offset <= offset + count <= self._begin + len(self._data):
            self._begin, self._data = offset, os.pread(self._descriptor, max(BLOCK, count), offset)
        return self._data[offset - self._begin : offset - self._begin + count]

    def line(self, offset: int) -> bytes:
        """The bytes up to the next newline, which is included, or to the end of the file."""
        size = 1
        while True:
            read_to_end = len(self.at(offset, size)) < size
            end = self._data.find(b"\n", offset - self._begin) + 1
            if end or read_to_end:
                return self._data[offset - self._begin : end or None]
            size = max(BLOCK, 4 * size)
