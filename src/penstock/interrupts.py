"""Handling of the signals that ask a process to end.

A process inherits ignored signals: a shell without job control starts background commands with SIGINT ignored
(``make test &`` in a script), and Python then installs no handler. Every Penstock program therefore sets its
handlers explicitly.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

_CLEANING = 10.0  # seconds after a signal in which further signals are ignored, because the cleanup takes a few
_WAKE_AFTER = (0.05, 0.5, 2.0)  # seconds after a signal; more than once, because the first may be too early


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to end. Only the handlers below raise it, in the main thread, so it differs from
    a ``KeyboardInterrupt`` raised by user code."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number
        """The exit code by which a shell reports a process that the signal ended."""


def raise_on_signals() -> None:
    """Raise ``Interrupted`` at SIGINT, SIGTERM and SIGHUP from now on, regardless of inherited settings. Only an
    ignored SIGHUP stays ignored, because of ``nohup``. A second signal shortly after the first raises nothing,
    because it would interrupt the cleanup. Call it in the main thread."""
    quiet_until = 0.0

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal quiet_until
        now = time.monotonic()
        if now >= quiet_until:
            quiet_until = now + _CLEANING
            raise Interrupted(number)

    _wake_the_main_thread()
    atexit.register(_ignore)  # the first function to be registered is called last
    for number in _heard():
        signal.signal(number, interrupt)


def leave_on_signals(code: int) -> None:
    """End the process immediately at a signal, with this exit code and without output. For the last moments of a
    process, when nothing is left to clean up and Python's shutdown would print a traceback."""

    def leave(number: int, frame: FrameType | None) -> None:
        os._exit(code)

    for number in _heard():
        signal.signal(number, leave)


def _ignore() -> None:
    """Ignore the signals. Registered with ``atexit``: afterwards Python removes its handlers, and nothing can hang
    any more."""
    for number in _heard():
        signal.signal(number, signal.SIG_IGN)


def _wake_the_main_thread() -> None:
    """Make handlers run soon. Python runs them in the main thread, between two bytecodes: a signal that arrives
    just before that thread blocks in a system call, or that another thread receives, would wait for the end of the
    call. So a helper thread is notified of every signal and, a moment later, interrupts the call of the main
    thread with SIGURG, which has no effect of its own."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGURG, lambda number, frame: None)
    main = threading.main_thread().ident
    assert main is not None

    def wake() -> None:
        while heard := os.read(reader, 1):
            if heard[0] == signal.SIGURG:
                continue
            for pause in _WAKE_AFTER:
                time.sleep(pause)
                signal.pthread_kill(main, signal.SIGURG)

    threading.Thread(target=wake, name="signals", daemon=True).start()


class StopSignals:
    """A context that counts signals instead of raising. The main thread enters it, lets other threads do the work,
    and checks ``count`` several times per second, so that a signal interrupts nothing halfway."""

    def __init__(self) -> None:
        self.count = 0
        self.number = 0
        """The number of the first signal."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in _heard():
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self.count += 1


def _heard() -> list[signal.Signals]:
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM] + ([] if ignored else [signal.SIGHUP])
