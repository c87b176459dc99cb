"""The function that Spark runs in each task of a stage: connects to the driver and runs a worker."""

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
from penstock.worker.acker_process import AckerSpec
from penstock.worker.ackers import SlotAckers
from penstock.worker.slot import Slot
from penstock.worker.wake import Wake

_GC_THRESHOLD = (50_000, 20, 50)
"""Allocations until a garbage collection of each generation. Tuples count as allocations but form no cycles;
Python's default of 700 cost a tenth of the time of a tuple bolt. Cycles in users' code are still collected, a
little later."""
_SWITCH_INTERVAL = 0.0005
"""Seconds until Python switches threads. With its default of 5 ms, a thread that writes a snapshot delays each
tuple by 20 ms per stage."""


class StageFunction:
    """The function of one stage, which Spark pickles. It contains only data, and its class is pickled by
    reference."""

    def __init__(
        self, stage: int, job: Job, address: tuple[str, int], secret: bytes, attempt: int, placed: bool = False
    ) -> None:
        """Called on the driver. ``address`` and ``secret``: of the coordinator. ``placed``: the driver assigns
        workers to tasks after all have connected; otherwise task n runs worker n.

        The deployment key is part of the function: workers sign what they store, and verify it before they
        unpickle it.
        """
        self._stage, self._job, self._placed = stage, job, placed
        self._key = signing.deployment_key()
        self._address, self._secret, self._attempt = address, secret, attempt

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Called by Spark once per task, in the worker process. Returns the task's output rows."""
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None
        signing.use_key(self._key)
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLD)
        sys.setswitchinterval(_SWITCH_INTERVAL)
        wake, number = Wake(), task.partitionId()
        control, node = ControlClient(self._address, self._secret, wake.set), node_name()
        ackers = SlotAckers(control, self._acker_spec(control, node)) if self._job.ackers > 1 else None
        control.send(Hello(self._stage, number, self._attempt, os.getpid(), node))
        slot = Slot(self._stage, self._job, self._attempt, control, wake, ackers)
        return slot.rows(batches, None if self._placed else AssignWorker(number))

    def _acker_spec(self, control: ControlClient, node: str) -> AckerSpec:
        """What all acker processes that this slot starts have in common."""
        interval = self._job.settings.lifecycle.metrics_interval
        return AckerSpec(self._address, self._secret, self._attempt, self._job.key, control.host, node, interval)


def node_name() -> str:
    """Return the Spark executor that this process belongs to, as ``host/id``; in local mode ``host/driver``. The
    id is on the command line of the executor's JVM, which is the parent of the Python daemon, the parent of this
    process."""
    executor = "driver"
    try:
        status = Path(f"/proc/{os.getppid()}/stat").read_text()
        jvm = status.rpartition(")")[2].split()[1]
        words = Path(f"/proc/{jvm}/cmdline").read_text().split("\0")
        executor = words[words.index("--executor-id") + 1]
    except (OSError, ValueError, IndexError):
        pass
    return f"{socket.gethostname()}/{executor}"
