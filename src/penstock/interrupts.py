"""How a process of ours takes the signals that ask it to end.

A process inherits ignored signals: a shell without job control starts background commands with SIGINT ignored
(``make test &`` in a script), and Python then installs no handler of its own. So every program of ours sets its
handlers explicitly.
"""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

_CLEANING = 10.0  # seconds after a signal in which others are ignored: removing what was started takes a few


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

    for number in _heard():
        signal.signal(number, interrupt)


def end_on_signals() -> None:
    """The signals end the process without a word. For its last moments, when nothing is left to clean up and
    Python's own shutdown would print a traceback."""
    for number in _heard():
        signal.signal(number, signal.SIG_DFL)


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
