"""Work on a thread of its own, so that the main thread stays free for signals and can give up waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.interrupts import StopSignals

_LOOK = 0.05  # seconds between two looks at the signals: what a user feels as at once

T = TypeVar("T")


class Background(Generic[T]):
    """A call that runs since this was made. The process does not wait for it at its end."""

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
        """True: it is done."""
        return self._done.wait(seconds)

    def wait_unless(self, signals: StopSignals) -> bool:
        """Wait until it is done, or another signal comes: False."""
        before = signals.count
        return self._wait(lambda: signals.count > before)

    def wait_unless_any(self, signals: StopSignals) -> bool:
        """The same; a signal that came before counts too."""
        return self._wait(lambda: signals.count > 0)

    def _wait(self, stop: Callable[[], bool]) -> bool:
        while not self._done.wait(_LOOK):
            if stop():
                return False
        return True

    def result(self) -> T:
        """What the call returned, or raises what it raised. Once it is done."""
        assert self._done.is_set()
        if self._error is not None:
            raise self._error
        return self._value
