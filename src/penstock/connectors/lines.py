"""Reads lines of files in blocks and keeps the offset of each line in its file."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

BLOCK = 1 << 20  # bytes read at a time: larger blocks are no faster
_NEWLINE = 10

_log = logging.getLogger(__name__)


def split_lines(data: bytes) -> pa.Array:
    """The lines of a block that ends with a newline, as a column of strings without line ends. Bytes that are not
    UTF-8 become the replacement character."""
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError:
            data = data.decode("utf-8", "replace").encode()  # a newline is never part of a broken character
    offsets = np.concatenate(([0], line_ends(data))).astype(np.int32)
    whole = pa.StringArray.from_buffers(len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(data))
    return pc.ascii_rtrim(whole, "\r\n")


def line_ends(data: bytes) -> npt.NDArray[np.int64]:
    """The offset behind each newline."""
    return np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + 1


class LineFile:
    """One file, read from an offset on in blocks of complete lines."""

    def __init__(self, path: str, offset: int, follow: bool) -> None:
        self.path, self.offset = path, offset
        self._follow = follow
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - stays open as long as the spout
        self.cuts: list[int] = []
        """Where lines without a newline ended."""

    @property
    def descriptor(self) -> int:
        return self._file.fileno()

    def read(self) -> tuple[int, bytes]:
        """The offset of the next block and its bytes: complete lines with their newlines. Empty at the end of the
        file. A last line without a newline counts as complete, unless the file is followed: then the rest is
        awaited."""
        if self._follow and os.fstat(self.descriptor).st_size < self.offset:
            _log.warning("%s became shorter; reading it from the beginning", self.path)
            self.offset = 0
        size = BLOCK
        while True:
            data = os.pread(self.descriptor, size, self.offset)
            end = data.rfind(b"\n") + 1
            if end or len(data) < size:
                break
            size *= 4  # the line is longer than the block
        begin = self.offset
        if not end and data and not self._follow:
            self.offset += len(data)
            self.cuts.append(self.offset)
            return begin, data + b"\n"
        self.offset += end
        return begin, data[:end]

    def close(self) -> None:
        self._file.close()


@dataclass
class _Block:
    path: str
    first: int  # number of its first line
    starts: npt.NDArray[np.int64]  # offset of each line in the file
    lines: pa.Array


class LineReader:
    """The lines of several files, one file after the other, numbered from 0 in the order they are read. Lines stay
    in memory until ``forget``. Used by the task's thread."""

    def __init__(self, files: Mapping[str, int], *, follow: bool) -> None:
        """``files`` maps paths to start offsets."""
        self._files = [LineFile(path, offset, follow) for path, offset in files.items()]
        self._follow = follow
        self._turn = 0  # index of the file to read next
        self._blocks: deque[_Block] = deque()
        self._loaded = 0  # lines loaded so far
        self._next = 0  # number of the next line to return

    def read(self, limit: int) -> tuple[int, pa.Array]:
        """The number of the first line, and up to ``limit`` lines; no lines if there are none at present."""
        if self._next == self._loaded:
            self._load()
        if self._next == self._loaded:
            return self._next, pa.array([], pa.string())
        block = self._blocks[-1]
        begin = self._next - block.first
        lines = block.lines.slice(begin, limit)
        first, self._next = self._next, self._next + len(lines)
        return first, lines

    def line(self, number: int) -> str:
        """A line that was read and not forgotten."""
        block = next(block for block in reversed(self._blocks) if block.first <= number)
        text: str = block.lines[number - block.first].as_py()
        return text

    def positions(self, done: int | None = None) -> dict[str, int]:
        """The offset to resume at in each file if all lines below the number ``done`` are processed. Without
        ``done``, if all lines that ``read`` returned are."""
        mark = self._next if done is None else done
        found = {file.path: file.offset for file in self._files}
        for block in reversed(self._blocks):
            index = max(mark - block.first, 0)
            if index < len(block.starts):
                found[block.path] = int(block.starts[index])
        return found

    def forget(self, done: int) -> None:
        """Release the memory of lines below this number. They cannot be read again."""
        while self._blocks and self._blocks[0].first + len(self._blocks[0].starts) <= done:
            self._blocks.popleft()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _load(self) -> None:
        """Load the next block of the current file, or of the first later file that has one."""
        for _ in self._files:
            file = self._files[self._turn]
            begin, data = file.read()
            if data:
                ends = line_ends(data)
                starts = begin + np.concatenate(([0], ends[:-1]))
                self._blocks.append(_Block(file.path, self._loaded, starts, split_lines(data)))
                self._loaded += len(ends)
                return
            self._turn = (self._turn + 1) % len(self._files)
