"""A slot: one of Spark's tasks, in which a worker runs. It moves rows between Spark's iterators and the worker
that has it; some slots are free, and a worker may come from another while the query runs."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from penstock import signing
from penstock.errors import PenstockError
from penstock.plan.model import WorkerId
from penstock.protocol.client import ControlClient
from penstock.protocol.messages import AssignWorker, Hello
from penstock.worker.host import LONGEST_WAIT, WorkerHost
from penstock.worker.job import Job
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


class Slot:
    """Has one worker after the other, or none."""

    def __init__(self, stage: int, job: Job, attempt: int, control: ControlClient, wake: Wake) -> None:
        self._stage, self._job, self._attempt = stage, job, attempt
        self._control, self._wake = control, wake
        self._driver: WorkerHost | None = None
        self._had_one = threading.Event()
        self._input_ended = False

    def rows(self, batches: Iterator[pa.RecordBatch], given: AssignWorker | None) -> Iterator[pa.RecordBatch]:
        """Spark's task: consume its rows in a thread, yield the worker's. ``given``: where it is clear from the
        start which worker that is."""
        threading.Thread(target=self._read, args=(batches,), name="slot-reader", daemon=True).start()
        try:
            while (taken := given or self._next()) is not None:
                given = None
                id = WorkerId(self._stage, taken.worker)
                self._driver = WorkerHost(id, self._job, self._attempt, self._control, self._wake, taken)
                self._had_one.set()
                yield from self._driver.rows(lambda: self._input_ended)
                self._driver = None
        finally:
            self._input_ended = True
            self._control.close()

    def _next(self) -> AssignWorker | None:
        """Wait for a worker; None: the query ends."""
        while not self._input_ended and not self._control.lost:
            while self._control.inbox:
                message = self._control.inbox.popleft()
                if isinstance(message, AssignWorker):
                    return message
            self._wake.wait(LONGEST_WAIT)
        return None

    def _read(self, batches: Iterator[pa.RecordBatch]) -> None:
        """Move frames into the worker; while it does not take them, or there is none yet, wait: Spark's buffers
        then hold the sender. Behind a worker that has moved away nothing comes that is of use."""
        try:
            while not self._had_one.wait(LONGEST_WAIT):
                if self._control.lost:
                    return
            for batch in batches:
                for value in batch.column(1) if batch.num_columns > 1 else ():
                    driver = self._driver
                    if value.is_valid and driver is not None:
                        driver.deliver(value.as_buffer())
            self._input_ended = True
        except Exception as error:
            broken_pipe = isinstance(error, OSError | EOFError | ValueError | pa.ArrowException)
            self._input_ended = broken_pipe and not isinstance(error, PenstockError)  # the query was stopped
            if not self._input_ended and self._driver is not None:  # a bug of ours must not look like an end
                self._driver.fail_reading(error)
        self._wake.set()


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
