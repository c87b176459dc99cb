"""The process of the processor: ``python -m penstock.persist.process``, started by the first task of the bolt.

It reads from standard input the deployment key, a specification, and later a line with the number of seconds left
to empty the queue. The end of standard input means that the worker has died; the processor then writes what it can
within a few seconds and ends. It writes statuses to standard output, one line of JSON each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from typing import IO

from penstock import signing
from penstock.clock import SystemClock
from penstock.errors import PenstockError
from penstock.persist.processor import Processor, ProcessorStatus, drained
from penstock.persist.spec import LENGTH, ProcessorSpec, load
from penstock.redaction import described, redact_tracebacks

HANGS = 4
"""Exit code: the store did not answer in time."""
FAILED = 5
"""Exit code: an error that another processor would encounter too; the last status contains it."""

_ORPHAN_SECONDS = 3.0  # seconds to empty the queue after the worker has died; the next processor does the rest
_REPORT_INTERVAL = 0.5  # seconds; as often as the workers report
_EXIT_SECONDS = 2.0  # seconds after which a process that should have ended is terminated


class _Ending:
    """The time at which the process should end, according to standard input."""

    def __init__(self, control: IO[bytes]) -> None:
        self.until: float | None = None
        self.wake = threading.Event()
        self._control = control
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def _listen(self) -> None:
        seconds = float(self._control.readline() or _ORPHAN_SECONDS)
        self.until = time.monotonic() + seconds
        self.wake.set()


class _Watchdog:
    """Terminates the process if a call of the store takes too long, or if the process does not end in time. A
    processor may be killed at any time, and there is no other way to end a call that hangs in an unknown
    library."""

    def __init__(self, processor: Processor, timeout: float, ending: _Ending, reporter: _Reporter) -> None:
        self._processor, self._timeout, self._ending, self._reporter = processor, timeout, ending, reporter
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(min(0.25, self._timeout / 4))
            now, since, until = time.monotonic(), self._processor.calling_since, self._ending.until
            if until is not None and now > until + _EXIT_SECONDS:
                os._exit(HANGS)
            if since is not None and now - since > self._timeout:
                self._reporter.report_trouble(f"the store has not answered for {self._timeout:g} s")
                os._exit(HANGS)


class _Reporter:
    """Writes statuses to standard output. Used by two threads."""

    def __init__(self, out: IO[str]) -> None:
        self._out, self._lock = out, threading.Lock()
        self._last = ProcessorStatus()
        self._due = 0.0

    def report(self, processor: Processor, last: bool = False) -> None:
        """Write the status every ``_REPORT_INTERVAL``, when ``trouble`` changes, and at the end."""
        now = time.monotonic()
        if last or now >= self._due or processor.status.trouble != self._last.trouble:
            self._due = now + _REPORT_INTERVAL
            self._write(dataclasses.replace(processor.report()))

    def report_trouble(self, text: str) -> None:
        self._write(dataclasses.replace(self._last, trouble=text, attempts=self._last.attempts + 1))

    def _write(self, status: ProcessorStatus) -> None:
        with self._lock:
            self._last = status
            with contextlib.suppress(OSError):  # the worker has died; standard input has ended too
                print(json.dumps(dataclasses.asdict(status)), file=self._out, flush=True)


def main() -> int:
    redact_tracebacks()
    control = open(0, "rb", buffering=0)  # noqa: SIM115 - a thread blocks in read(), and a buffer would have a lock
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of a store must not be mistaken for a status
    signing.use_key(_read(control, signing.KEY_BYTES))
    (length,) = LENGTH.unpack(_read(control, LENGTH.size))
    spec = load(_read(control, length))
    reporter = _Reporter(out)
    try:
        return _run(spec, _Ending(control), reporter)
    except PenstockError as error:
        reporter.report_trouble(str(error))
        return FAILED
    except Exception as error:  # a user's store may raise anything
        reporter.report_trouble(described(error))
        raise


def _read(control: IO[bytes], size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += control.read(size - len(data)) or sys.exit("penstock.persist.process is started by a PersistBolt")
    return data


def _run(spec: ProcessorSpec, ending: _Ending, reporter: _Reporter) -> int:
    clock = SystemClock()
    processor = spec.processor(clock)
    _Watchdog(processor, spec.timeout, ending, reporter)
    while ending.until is None:
        processor.turn()
        reporter.report(processor)
        if wait := processor.wait():
            ending.wake.wait(wait)
    empty = drained(processor, ending.until, clock, time.sleep)
    reporter.report(processor, last=True)
    processor.close()
    return 0 if empty else 1


if __name__ == "__main__":
    sys.exit(main())
