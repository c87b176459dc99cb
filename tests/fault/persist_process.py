"""A topology with a PersistBolt in a process of its own, for tests that kill it: python -m … FOLDER START.

It runs until the file ``stop`` is there and all is acked, then drains and ends with 0; with ``PASSING`` for what a
restart may mend. ``START`` counts the processes of a run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import struct
import sys
import time
from pathlib import Path

from penstock import Delivery, Settings, Spout, TopologyBuilder
from penstock.clock import SimulatedClock
from penstock.errors import ComponentError, SinkRefused
from penstock.testing import LocalRunner

PASSING = 3
"""Exit code: the supervisor on Spark would start again."""
KEYS = 40
_BLOCK = 500  # messages: how far a source may emit before it says so
_ACK = struct.Struct("<QQ")


def key_of(n):
    return f"key-{n % KEYS}"


class Oracle:
    """What was promised to the source: ⟨start, n⟩ of every ack, on disk before ``ack`` returns."""

    def __init__(self, folder):
        self._path = Path(folder) / "acked"

    def read(self):
        data = self._path.read_bytes() if self._path.exists() else b""
        return list(_ACK.iter_unpack(data[: len(data) // _ACK.size * _ACK.size]))

    def open(self):
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.ftruncate(self._file, os.fstat(self._file).st_size // _ACK.size * _ACK.size)  # half an ack is none

    def add(self, start, numbers):
        os.write(self._file, b"".join(_ACK.pack(start, n) for n in numbers))
        os.fsync(self._file)


class Numbers(Spout):
    """⟨n, key, start⟩ for n = 0, 1, ... at so many a second. As a real source it begins, at least once, with what
    was never acked, and exactly once where the committed epoch ends.

    No process emits beyond the number in the file ``ceiling``; that is where it ends when it is told to stop, so
    the last process emits everything that any has.
    """

    def __init__(self, folder, start, rate):
        self.folder, self.start, self.rate = Path(folder), start, rate

    def declare_output_fields(self, declarer):
        declarer.declare(("n", int), ("key", str), ("start", int))

    def open(self, conf, context, collector):
        self.collector = collector
        oracle = Oracle(self.folder)
        self.exactly = context.delivery == "exactly_once"
        self.position = context.state.value("position", 0)
        self.acked = set() if self.exactly else {n for _, n in oracle.read()}
        self.next = self.first = self.position.value if self.exactly else 0
        ceiling = self.folder / "ceiling"
        self.ceiling = int(ceiling.read_text()) if ceiling.exists() else 0
        self.failed = 0
        self.oracle = oracle
        oracle.open()

    def activate(self):
        self.began, self.emitted = time.monotonic(), 0

    def next_tuple(self):
        if self.emitted >= self.rate * (time.monotonic() - self.began):
            return
        while self.next in self.acked:
            self.next += 1
        if self.next >= self.ceiling:
            if (self.folder / "stop").exists():
                return
            self.ceiling += _BLOCK
            _replace(self.folder / "ceiling", str(self.ceiling))
        self.collector.emit((self.next, key_of(self.next), self.start), msg_id=self.next)
        self.next += 1
        self.emitted += 1

    def ack_many(self, numbers):
        self.oracle.add(self.start, numbers)
        self.acked.update(numbers)

    def fail(self, msg_id, failure):
        """Nothing fails here but by a fault: queues and stores that are away are waited for."""
        self.failed += 1
        print(f"message {msg_id} failed: {failure}", file=sys.stderr, flush=True)

    def before_snapshot(self):
        self.position.value = self.next

    @property
    def done(self):
        return (
            (self.folder / "stop").exists()
            and self.next >= self.ceiling
            and len(self.acked) >= self.ceiling - self.first
        )


class RealClock(SimulatedClock):
    """Lets the local runner live in real time."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)
    advance = staticmethod(time.sleep)


def _replace(path, text):
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


def _rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(folder, start):
    folder = Path(folder)
    work = pickle.loads((folder / "work.pickle").read_bytes())
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(folder, start, work["rate"]))
    builder.set_bolt("sink", work["bolt"], 2).fields_grouping("numbers", "key")
    settings = Settings(
        delivery=Delivery(work["delivery"], epoch_interval=0.1, message_timeout=600.0, max_spout_pending=2000)
    )
    try:
        runner = LocalRunner(
            builder.build("persisted", settings), seed=start, clock=RealClock(), folder=work["state"]
        )
    except ComponentError as error:  # the queue may be away at this moment; the supervisor tries again
        print(error, file=sys.stderr)
        return PASSING
    (numbers,), sink = runner.component("numbers"), runner.component("sink")[0]

    def tell():
        state = {
            "pid": os.getpid(),
            "start": start,
            "next": numbers.next,
            "acked": len(numbers.acked),
            "failed": numbers.failed,
            "rss": _rss(),
            "errors": [str(error) for error in runner.errors],
            **dataclasses.asdict(sink._shown),
        }
        _replace(folder / "status.json", json.dumps(state))

    try:
        while not numbers.done or runner.commits.published < runner.commits.committed:
            runner.run(0.02)
            tell()
        runner.deactivate()
        runner.close()
        tell()
    except SinkRefused as error:
        print(error, file=sys.stderr)
        return PASSING
    return 0


if __name__ == "__main__":
    from tests.fault.persist_process import main  # components travel by the name of their module

    sys.exit(main(sys.argv[1], int(sys.argv[2])))
