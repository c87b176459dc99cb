"""Retries an operation while a state store does not answer, with growing pauses and a warning before each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from penstock.errors import StateUnavailable

log = logging.getLogger("penstock.state")

_FIRST_PAUSE = 0.5
"""Seconds before the first retry, so that a brief failure costs little time. The pause doubles with each retry."""
_LONGEST_PAUSE = 10.0
"""Longest pause in seconds. A store that answers again is used within that time."""

Result = TypeVar("Result")


def retried(
    action: Callable[[], Result],
    patience: float,
    wait: Callable[[float], bool],
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """Call ``action`` until it succeeds, and return its result. All functions are called on the caller's thread.

    ``wait`` sleeps for the given seconds and returns True if the caller no longer wants the result. ``say`` is
    called with a sentence before each pause. Raises the last ``StateUnavailable`` after ``patience`` seconds of
    pauses or if ``wait`` returns True. Every other error is raised at once.
    """
    waited, pause = 0.0, _FIRST_PAUSE
    while True:
        try:
            return action()
        except StateUnavailable as error:
            if waited >= patience:
                raise
            text = (
                f"the state store does not answer ({str(error).rstrip('.')}); Penstock tries again in {pause:g} s"
            )
            log.warning("%s", text)
            say(text)
            if wait(pause):
                raise
            waited, pause = waited + pause, min(2 * pause, _LONGEST_PAUSE)
