"""How a process of ours takes the signals that ask it to end.

A process inherits ignored signals: a shell without job control starts background commands with SIGINT ignored
(``make test &`` in a script), and Python then installs no handler of its own. So every program of ours sets its
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

_CLEANING = 10.0  # seconds after a signal in which others are ignored: removing what was started takes a few
_WAKE_AFTER = (0.05, 0.5, 2.0)  # seconds after a signal: more than once, as the first may come too early as well


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to end. Only the handlers below raise it, in the main thread, so it can be told
    from a ``KeyboardInterrupt`` that a user's code raises."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number
        """As a shell reports a process that the signal ended."""


def raise_on_signals() -> None:
    """SIGINT, SIGTERM and SIGHUP raise ``Interrupted`` from now on, whatever was inherited. Only SIGHUP stays
    ignored if it was: that is what ``nohup`` is for. A second signal soon after the first raises nothing: it would
    interrupt the code that removes what was started. Call it in the main thread."""
    quiet_until = 0.0

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal quiet_until
        now = time.monotonic()
        if now >= quiet_until:
            quiet_until = now + _CLEANING
            raise Interrupted(number)

    _wake_the_main_thread()
    atexit.register(_ignore)  # the first to be registered is the last to be called
    for number in _heard():
        signal.signal(number, interrupt)


def leave_on_signals(code: int) -> None:
    """The signals end the process at once, with this exit code and without a word. For its last moments, when
    nothing is left to clean up and Python's own shutdown would print a traceback."""

    def leave(number: int, frame: FrameType | None) -> None:
        os._exit(code)

    for number in _heard():
        signal.signal(number, leave)


def _ignore() -> None:
    """Behind the calls of ``atexit`` Python takes its handlers away, and nothing of it can hang any more."""
    for number in _heard():
        signal.signal(number, signal.SIG_IGN)


def _wake_the_main_thread() -> None:
    """See to it that handlers run soon. Python runs them in the main thread, between two steps of it: a signal
    that arrives just before that thread blocks in a system call, or in another thread, would wait for the call's
    end. So a thread is told of every signal and, a moment later, interrupts the main thread's call by a signal
    that means nothing: SIGURG."""
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
    """Counts the signals instead of raising, while it is entered. The main thread enters it, has other threads do
    what takes time, and looks at ``count`` several times a second: so a signal interrupts nothing half-way."""

    def __init__(self) -> None:
        self.count = 0
        self.number = 0
        """Of the first signal."""
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
