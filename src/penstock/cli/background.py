"""Runs a call on its own thread, so that the main thread can handle signals and stop waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.interrupts import StopSignals

_POLL_INTERVAL = 0.05  # seconds between two checks for signals; a user perceives this delay as immediate

T = TypeVar("T")


class Background(Generic[T]):
    """A call that starts on a daemon thread when this object is created. The process does not wait for it at
    exit."""

    def __init__(self, name: str, call: Callable[[], T]) -> None:
        self._call = call
        self._value: T
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def wait(self, seconds: float) -> bool:
        """Wait for at most ``seconds``. Returns whether the call has finished."""
        return self._done.wait(seconds)

    def wait_unless(self, signals: StopSignals) -> bool:
        """Wait until the call has finished (True) or a new signal arrives (False)."""
        before = signals.count
        return self._wait(lambda: signals.count > before)

    def wait_unless_any(self, signals: StopSignals) -> bool:
        """Like ``wait_unless``, but a signal that arrived before this call also ends the wait."""
        return self._wait(lambda: signals.count > 0)

    def _wait(self, stop: Callable[[], bool]) -> bool:
        while not self._done.wait(_POLL_INTERVAL):
            if stop():
                return False
        return True

    def result(self) -> T:
        """Return the call's result, or raise its exception. The call must have finished."""
        assert self._done.is_set()
        if self._error is not None:
            raise self._error
        return self._value
