"""The process the processor runs in: ``python -m penstock.persist.process``, started by the bolt's first task.

Standard input brings the deployment key and a specification, then nothing, or a line that says how many seconds
are left to empty the queue. Its end means that the worker is gone: then the processor writes what it can within a
few seconds and goes too. Standard output carries statuses, a line of JSON each.
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
"""Exit code: an error that another processor would meet too; the last status tells it."""

_ORPHAN_SECONDS = 3.0  # an orphan has these to empty the queue; what is left, the next processor finds
_REPORT_INTERVAL = 0.5  # s; as often as the workers report
_LAST_WORDS = 2.0  # s after which a process that should have ended is ended


class _Ending:
    """When to end, as standard input says."""

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
    """Ends the process when the store holds it for too long, or when it does not end: a processor can be killed at
    any time, and hanging calls of unknown libraries can be ended in no other way."""

    def __init__(self, processor: Processor, timeout: float, ending: _Ending, say: _Reporter) -> None:
        self._processor, self._timeout, self._ending, self._say = processor, timeout, ending, say
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(min(0.25, self._timeout / 4))  # a thread that only watches: nothing wakes it
            now, since, until = time.monotonic(), self._processor.calling_since, self._ending.until
            if until is not None and now > until + _LAST_WORDS:
                os._exit(HANGS)
            if since is not None and now - since > self._timeout:
                self._say.trouble(f"the store has not answered for {self._timeout:g} s")
                os._exit(HANGS)


class _Reporter:
    """Writes statuses; from two threads."""

    def __init__(self, out: IO[str]) -> None:
        self._out, self._lock = out, threading.Lock()
        self._last = ProcessorStatus()
        self._due = 0.0

    def report(self, processor: Processor, last: bool = False) -> None:
        """Now and then, whenever there is news of trouble, and at the end."""
        now = time.monotonic()
        if last or now >= self._due or processor.status.trouble != self._last.trouble:
            self._due = now + _REPORT_INTERVAL
            self._write(dataclasses.replace(processor.report()))

    def trouble(self, text: str) -> None:
        self._write(dataclasses.replace(self._last, trouble=text, attempts=self._last.attempts + 1))

    def _write(self, status: ProcessorStatus) -> None:
        with self._lock:
            self._last = status
            with contextlib.suppress(OSError):  # the worker is gone: standard input says so too
                print(json.dumps(dataclasses.asdict(status)), file=self._out, flush=True)


def main() -> int:
    redact_tracebacks()
    control = open(0, "rb", buffering=0)  # noqa: SIM115 - a thread waits in it to the end, and a buffer has a lock
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a store prints must not look like a status
    signing.use_key(_read(control, signing.KEY_BYTES))
    (length,) = LENGTH.unpack(_read(control, LENGTH.size))
    spec = load(_read(control, length))
    reporter = _Reporter(out)
    try:
        return _run(spec, _Ending(control), reporter)
    except PenstockError as error:
        reporter.trouble(str(error))
        return FAILED
    except Exception as error:  # a user's store may raise anything
        reporter.trouble(described(error))
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
