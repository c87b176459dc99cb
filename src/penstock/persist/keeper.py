"""Keeps the process of a processor running, from the worker."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
import time
from collections.abc import Callable

from penstock import signing
from penstock.child_process import start_module
from penstock.persist.policy import Patience
from penstock.persist.processor import ProcessorStatus
from penstock.persist.spec import LENGTH
from penstock.texts import parse_json

log = logging.getLogger("penstock.persist")

_STEADY = 10.0  # seconds; after a processor has run for this long, its next failure counts as the first one


class Keeper:
    """Starts a processor, receives its status, and starts another one when it dies. ``on_status`` is called by the
    keeper's thread."""

    def __init__(self, spec: bytes, on_status: Callable[[ProcessorStatus], None]) -> None:
        self._spec, self._on_status = spec, on_status
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, name="persist-keeper", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def close(self, seconds: float) -> bool:
        """Ask the processor to empty the queue, and wait ``seconds`` for it. Returns True if the queue is empty. A
        processor that needs longer continues for a moment and then ends."""
        with self._lock:
            self._ending.set()
            process = self._process
        if process is None:
            return False
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(b"%g\n" % seconds)
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds + 0.5)
        self._thread.join(0.5)
        return process.returncode == 0

    def _keep(self) -> None:
        patience, status = Patience(), ProcessorStatus()
        while True:
            with self._lock:
                if self._ending.is_set():
                    return
                self._process = process = _start(self._spec)
            began = time.monotonic()
            status = self._receive(process, status)
            code = process.wait()
            if self._ending.is_set():
                return
            now = time.monotonic()
            if now - began > _STEADY:
                patience.succeeded()
            patience.failed(now)
            status.trouble = status.trouble or f"the processor ended with exit code {code}"
            status.attempts, status.pause = max(patience.attempts, status.attempts), patience.wait(now)
            log.warning("%s; a new processor starts in %.1f s", status.trouble, status.pause)
            self._on_status(status)
            self._ending.wait(status.pause)

    def _receive(self, process: subprocess.Popen[bytes], status: ProcessorStatus) -> ProcessorStatus:
        """Receive statuses until the process ends, and return the last one. Its counts are added to those of the
        processor before."""
        assert process.stdout is not None
        before = (status.written, status.rejected, status.again, status.lost)
        for line in process.stdout:
            with contextlib.suppress(ValueError, TypeError):  # an incomplete line of a process that was killed
                status = ProcessorStatus(**parse_json(line))
                status.written, status.rejected, status.again, status.lost = (
                    mine + theirs
                    for mine, theirs in zip(
                        (status.written, status.rejected, status.again, status.lost), before, strict=True
                    )
                )
                self._on_status(status)
        return status


def _start(spec: bytes) -> subprocess.Popen[bytes]:
    """Start the process. The worker tells it when to end."""
    data = signing.deployment_key() + LENGTH.pack(len(spec)) + spec
    return start_module("penstock.persist.process", data, stdout=subprocess.PIPE)
