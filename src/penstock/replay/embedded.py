"""Replay queues on a local disk, without a server.

The files of a task are in its own folder. A task that is started again on another machine does not find them, so
use a single machine, a file system that all nodes share, or queues on Kafka.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from penstock.acking.lineage import I64
from penstock.errors import EnvironmentFault
from penstock.private_folder import make_folders, open_here
from penstock.replay.dead_letters import DiskDeadLetterStore
from penstock.replay.progress import Positions, ReadProgress
from penstock.replay.queues import Pointer, Queues, QueuesBusy, ReplayQueue, ReplayStore
from penstock.replay.records import ReplayRecord, decode, encode, lost
from penstock.replay.second_reader import SecondReader
from penstock.storage.segments import SEGMENT_BYTES, Mark, SegmentLog, replace_file
from penstock.topology.components import Context

FOLDER = "replay"
ABOUT = "about.json"


class DiskQueue(ReplayQueue):
    """A queue in a separate folder. Other programs may append to it while it is read."""

    def __init__(self, folder: str | Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        folder = Path(folder)
        self._log = SegmentLog(folder, segment_bytes)
        self._released_file = folder / "position"
        self._start(self._released())

    def append(self, records: Sequence[ReplayRecord]) -> None:
        if records:
            self._log.append([encode(record) for record in records], self._released())

    def read(self, limit: int) -> list[tuple[int, ReplayRecord]]:
        stored = self._reader.read(limit)
        try:
            found = [(number, decode(data)) for number, data in stored]
        except EnvironmentFault:
            self._reader.put_back(stored)
            raise
        if found:
            self._progress.read([number for number, _ in found], self._reader.number)
        return found

    def read_again(self, positions: I64) -> list[ReplayRecord]:
        return [
            lost(f"record {position} of {self._log.folder}", data) if isinstance(data, str) else decode(data)
            for position, data in zip(positions.tolist(), self._again.read(positions), strict=False)
        ]

    def seek(self, position: int) -> None:
        released = self._released()
        # Not beyond the end: records lost in a power failure had been processed, but their numbers are used again.
        self._start(max(released, min(position, self._log.end(released))))

    def done(self, positions: Positions) -> None:
        self._progress.done(positions)
        while len(self._marks) > 1 and self._marks[1].number <= self._progress.position:
            self._marks.popleft()

    @property
    def position(self) -> int:
        return self._progress.position

    @property
    def empty(self) -> bool:
        return not self._reader.more()

    def release(self, position: int) -> None:
        """Steps: (1) replace the position file; (2) remove segments whose records all lie before the position."""
        if position > self._released():
            replace_file(self._released_file, b"%d" % position)
            self._log.drop_before(position)

    def close(self) -> None:
        self._reader.close()
        self._again.close()
        self._log.close()

    def _start(self, position: int) -> None:
        self._marks: deque[Mark] = deque()
        self._reader = self._log.reader(position, marks=self._marks)
        self._again = SecondReader(self._log, self._marks)
        self._progress = ReadProgress(position)

    def _released(self) -> int:
        try:
            return int(self._released_file.read_bytes())
        except FileNotFoundError:
            return 0


class DiskPointer(Pointer):
    """The pointer in a file that is replaced atomically."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def load(self) -> bool:
        try:
            return self._path.read_bytes() == b"exchanged"
        except FileNotFoundError:
            return False

    def store(self, exchanged: bool) -> None:
        replace_file(self._path, b"exchanged" if exchanged else b"as made")


class EmbeddedStore(ReplayStore):
    """Keeps the queues of each task in its own folder (``Context.folder``), which must be a local path."""

    def check(self, context: Context) -> None:
        local_folder(context)

    def open(self, context: Context) -> Queues:
        folder = local_folder(context)
        make_folders(folder)
        owner = _Owner(folder / "owner")
        try:
            about = {"topology": context.topology, "component": context.component, "index": context.index}
            if not (folder / ABOUT).exists():
                replace_file(folder / ABOUT, json.dumps(about).encode())
            return Queues(*_parts(folder), release=owner.release)
        except BaseException:
            owner.release()
            raise


def open_beside(folder: Path) -> Queues:
    """The queues in a folder that a running topology may be using. Callers may append to the queues and list,
    remove or add dead letters. All other operations are reserved for the topology."""
    return Queues(*_parts(folder))


def local_folder(context: Context) -> Path:
    """The task's folder for replay, as a local path. Raises ``EnvironmentFault`` if ``Context.folder`` is not
    one."""
    folder = context.folder.removeprefix("file://")
    where = f"component '{context.component}', replay"
    if not folder:
        raise EnvironmentFault(
            where,
            "the embedded queues need a folder that survives the process, and this task has none",
            "Set delivery to at_least_once and delivery.state_dir to a folder; in tests write "
            "LocalRunner(topology, folder=…).",
        )
    if "://" in folder:
        raise EnvironmentFault(
            where,
            f"the embedded queues need a local path, not '{context.folder}'",
            "Keep the queues on Kafka: ReplaySpout(source, store=KafkaStore(servers)). Or "
            "set delivery.state_dir to a local path.",
        )
    return Path(folder) / FOLDER


def _parts(folder: Path) -> tuple[ReplayQueue, ReplayQueue, DiskDeadLetterStore, Pointer]:
    return (
        DiskQueue(folder / "from"),
        DiskQueue(folder / "to"),
        DiskDeadLetterStore(folder / "dead"),
        DiskPointer(folder / "pointer"),
    )


class _Owner:
    """Ensures that one process at a time uses a task's queues. The kernel releases the lock when the process
    dies."""

    def __init__(self, path: Path) -> None:
        self._file = open_here(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise QueuesBusy(
                f"{path.parent}",
                "another process holds this task's replay queues",
                "Wait until it ends, or give this topology another name or delivery.state_dir.",
            ) from None

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
