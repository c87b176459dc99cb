"""The console that commands print with."""

from __future__ import annotations

from rich.console import Console


class Terminal(Console):
    """Rich's console, except that it raises ``BrokenPipeError`` when the reader of a pipe is gone, so that the
    command can end in order. Rich's own console would end the process with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
