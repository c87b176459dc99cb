"""What the command ``penstock`` runs first. Importing ``penstock`` takes most of a second; until its own handlers
are set, a signal ends the command with a sentence here, and not with a traceback from somewhere in the imports."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> int:
    """The command; returns its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    from penstock.cli.main import main as run

    return run()


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"penstock: stopped\n")
    os._exit(128 + number)  # nothing has been started, and an exception would be printed by whatever is imported
