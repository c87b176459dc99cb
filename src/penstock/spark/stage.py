"""What Spark runs in each task of a stage."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from penstock import signing
from penstock.protocol.client import ControlClient
from penstock.protocol.commands import AssignWorker
from penstock.protocol.events import Hello
from penstock.protocol.job import Job
from penstock.worker.slot import Slot
from penstock.worker.wake import Wake

# Tuples are objects the collector counts but never needs to find: by default it looks every 700 of them, which
# took a tenth of a tuple bolt's time. Cycles in users' code are still found, a little later.
_GC_THRESHOLD = (50_000, 20, 50)
_SWITCH_INTERVAL = 0.0005  # seconds; with Python's 5 ms a snapshot written beside the loop cost each hop 20 ms


class StageFunction:
    """What Spark pickles for each stage: plain data, so that it pickles by reference to this module."""

    def __init__(
        self, stage: int, job: Job, address: tuple[str, int], secret: bytes, attempt: int, placed: bool = False
    ) -> None:
        """``placed``: which worker runs in which task is said when all have connected. Made by the driver, whose
        deployment key goes along: workers sign what they store, and check what they unpickle."""
        self._stage, self._job, self._placed = stage, job, placed
        self._key = signing.deployment_key()
        self._address, self._secret, self._attempt = address, secret, attempt

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None
        signing.use_key(self._key)
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLD)
        sys.setswitchinterval(_SWITCH_INTERVAL)
        wake, number = Wake(), task.partitionId()
        control = ControlClient(self._address, self._secret, wake.set)
        control.send(Hello(self._stage, number, self._attempt, os.getpid(), node_name()))
        slot = Slot(self._stage, self._job, self._attempt, control, wake)
        return slot.rows(batches, None if self._placed else AssignWorker(number))


def node_name() -> str:
    """The Spark executor this process belongs to, as ``host/id``: named on the command line of the JVM that
    is the parent of our parent, the daemon. In local mode there is none: ``host/driver``."""
    executor = "driver"
    try:
        status = Path(f"/proc/{os.getppid()}/stat").read_text()
        jvm = status.rpartition(")")[2].split()[1]
        words = Path(f"/proc/{jvm}/cmdline").read_text().split("\0")
        executor = words[words.index("--executor-id") + 1]
    except (OSError, ValueError, IndexError):
        pass
    return f"{socket.gethostname()}/{executor}"
