"""The console that commands print with."""

from __future__ import annotations

from rich.console import Console


class Terminal(Console):
    """As rich's. Where the reader of a pipe is gone it raises ``BrokenPipeError``, so that the command can end in
    order; rich's own would end the process with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
