"""Entry point of the command ``penstock``. Importing ``penstock`` takes most of a second. During that time a
signal ends the command with a message instead of a traceback from the imports."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> int:
    """Run the command and return its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    from penstock.cli.main import main as run

    return run()


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"penstock: stopped\n")
    os._exit(128 + number)  # nothing has been started yet; an exception would print a traceback
