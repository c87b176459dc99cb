"""Points at which a process kills itself, for tests of crashes between two steps of a commit, a replacement or a
move.

Disabled unless the setting ``lifecycle.crash_at`` names a step and an epoch, such as ``written:3``, optionally
with a worker (``written:3:1.0``). Only the first query run of a topology crashes, so that the next one can
recover. For a step of a replacement or a move, the number is that of the replacement or move, and the driver
crashes.
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
"""The steps of a commit, in order."""


def die() -> NoReturn:
    """Kill this process with SIGKILL, without any cleanup."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("the process survived SIGKILL")


class CrashPoint:
    """Kills the process at the configured step."""

    def __init__(self, spec: str, where: str = "", die: Callable[[], NoReturn] = die) -> None:
        step, _, rest = spec.partition(":")
        epoch, _, worker = rest.partition(":")
        self._at = (step, int(epoch)) if spec and worker in ("", where) else None
        self._die = die

    def __call__(self, step: str, epoch: int) -> None:
        """Called when ``step`` of ``epoch`` is done."""
        if self._at == (step, epoch):
            self._die()
