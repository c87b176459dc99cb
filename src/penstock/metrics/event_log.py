"""The newest decisions and errors of a topology, for display."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from penstock.metrics.views import Note
from penstock.redaction import redacted

_KEPT = 64
"""Entries of each kind that are kept: one or two screens."""


class EventLog:
    """Bounded lists of notes and errors. Secrets are redacted. Not thread-safe: the metrics bus holds its lock
    during every call."""

    def __init__(self) -> None:
        self.notes: deque[Note] = deque(maxlen=_KEPT)
        self.errors: deque[Note] = deque(maxlen=_KEPT)
        self._unread: deque[str] = deque(maxlen=_KEPT)

    def add_note(self, time: float, kind: str, component: str, text: str) -> None:
        self.notes.append(Note(time, kind, component, redacted(text)))

    def add_errors(self, time: float, errors: Sequence[str]) -> None:
        texts = [redacted(text) for text in errors]
        self._unread.extend(texts)
        self.errors.extend(Note(time, "error", "", text) for text in texts)

    def take_unread(self) -> list[str]:
        """The error texts since the last call."""
        taken = list(self._unread)
        self._unread.clear()
        return taken

    def prepend(self, earlier: EventLog) -> None:
        """Insert the entries of an earlier log before those of this one."""
        self.notes = deque([*earlier.notes, *self.notes], _KEPT)
        self.errors = deque([*earlier.errors, *self.errors], _KEPT)
        self._unread = deque([*earlier._unread, *self._unread], _KEPT)
