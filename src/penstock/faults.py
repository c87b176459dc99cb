"""Points where a process can be told to die, for the crash tests of each gap between two steps of a commit, of a
replacement or of a worker's move.

Off unless the setting ``lifecycle.crash_at`` names a step and an epoch, such as ``written:3``; a worker may follow
(``written:3:1.0``). Only the first start of a topology dies: what it is started again for is to live. For a step
of a replacement (``driver.replacement``) or of a move (``driver.move``) the number says which of them, and the
driver dies.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import NoReturn

STEPS = (
    "announced",
    "marked",
    "snapshotted",
    "written",
    "reported",
    "collected",
    "committed",
    "notified",
    "published",
)
"""In the order of a commit; see ``coordinator.commits``."""


def die() -> NoReturn:
    """As suddenly as processes do."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process went on")


class CrashPoint:
    """Dies where it is told to."""

    def __init__(self, spec: str, where: str = "", die: Callable[[], NoReturn] = die) -> None:
        step, _, rest = spec.partition(":")
        epoch, _, worker = rest.partition(":")
        self._at = (step, int(epoch)) if spec and worker in ("", where) else None
        self._die = die

    def __call__(self, step: str, epoch: int) -> None:
        """Now ``step`` of ``epoch`` has been done."""
        if self._at == (step, epoch):
            self._die()
