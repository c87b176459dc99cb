"""Keeps a processor's process alive, from the worker."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from penstock import signing
from penstock.persist.policy import Patience
from penstock.persist.processor import ProcessorStatus
from penstock.persist.spec import LENGTH
from penstock.texts import parse_json

log = logging.getLogger("penstock.persist")

_STEADY = 10.0  # s after which a processor has proved itself, and the next death is a first one


class Keeper:
    """Starts a processor, hears what it says, starts another when it dies. ``heard`` is called from a thread of
    its own."""

    def __init__(self, spec: bytes, heard: Callable[[ProcessorStatus], None]) -> None:
        self._spec, self._heard = spec, heard
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
        """Have the queue emptied, and wait so long for it; True: it is empty. A processor that needs longer goes
        on for a moment, then ends."""
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
            status = self._listen(process, status)
            code = process.wait()
            if self._ending.is_set():
                return
            now = time.monotonic()
            if now - began > _STEADY:
                patience.succeeded()
            patience.failed(now)
            status.trouble = status.trouble or f"the processor ended with {code}"
            status.attempts, status.pause = max(patience.attempts, status.attempts), patience.wait(now)
            log.warning("%s; another starts in %.1f s", status.trouble, status.pause)
            self._heard(status)
            self._ending.wait(status.pause)

    def _listen(self, process: subprocess.Popen[bytes], status: ProcessorStatus) -> ProcessorStatus:
        """Until the process ends; returns its last status. Its counts go on from those of the one before."""
        assert process.stdout is not None
        before = (status.written, status.rejected, status.again, status.lost)
        for line in process.stdout:
            with contextlib.suppress(ValueError, TypeError):  # half a line of one that was killed
                status = ProcessorStatus(**parse_json(line))
                status.written, status.rejected, status.again, status.lost = (
                    mine + theirs
                    for mine, theirs in zip(
                        (status.written, status.rejected, status.again, status.lost), before, strict=True
                    )
                )
                self._heard(status)
        return status


def _start(spec: bytes) -> subprocess.Popen[bytes]:
    """With this process's modules, wherever they come from, and out of the reach of Ctrl-C: the worker says when
    to end. ``-P``: without the folder it happens to be started in, where anyone may have put modules. The
    deployment key goes through the pipe: other users can see arguments, and other programs the environment."""
    path = [os.path.abspath(entry) for entry in sys.path if entry]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "penstock.persist.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it may be dead already
        process.stdin.write(signing.deployment_key() + LENGTH.pack(len(spec)) + spec)
        process.stdin.flush()
    return process
