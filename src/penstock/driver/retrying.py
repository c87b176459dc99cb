"""Trying again while a state store does not answer, with growing pauses, and not in silence."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from penstock.errors import StateUnavailable

log = logging.getLogger("penstock.state")

_FIRST_PAUSE = 0.5  # seconds; doubled for each attempt in vain
_LONGEST_PAUSE = 10.0  # seconds

Result = TypeVar("Result")


def retried(
    action: Callable[[], Result],
    patience: float,
    wait: Callable[[float], bool],
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """What ``action`` returns, which may be called several times. Raises its last ``StateUnavailable`` after
    ``patience`` seconds of pauses, or when ``wait``, which passes the time, says that nobody wants it any more;
    every other error at once. ``say`` is called with a sentence before each pause."""
    waited, pause = 0.0, _FIRST_PAUSE
    while True:
        try:
            return action()
        except StateUnavailable as error:
            if waited >= patience:
                raise
            text = f"the state store does not answer, trying again in {pause:g} s: {error}"
            log.warning("%s", text)
            say(text)
            if wait(pause):
                raise
            waited, pause = waited + pause, min(2 * pause, _LONGEST_PAUSE)
