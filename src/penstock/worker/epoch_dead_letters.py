"""Dead letters of tuples that a task gives up under exactly-once delivery.

No spout emits such a tuple again, so its dead letter must be stored before the epoch is committed. An epoch that
is processed again after a restart produces its dead letters again. Dead letters therefore carry their generation
and epoch, and are valid only if that generation committed that epoch (``replay.state_dead_letters``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.clock import Clock
from penstock.errors import ComponentError, PenstockError
from penstock.replay.records import ReplayRecord, encode
from penstock.replay.state_dead_letters import epoch_dead_letters
from penstock.texts import bounded_repr
from penstock.topology.components import Context, Failure

_MOST_DEAD_LETTERS = 1000
"""Dead letters in memory. They are stored as one file, and storing more at once would save little."""
_MOST_BYTES = 8 << 20
"""Estimated bytes of dead letters in memory, for large tuples: a worker may have many tasks."""
_MOST_VALUE = 64 << 10
"""Bytes or characters of one value in a dead letter. A longer value is truncated: the beginning is enough to
identify it."""
_SMALL = 64
"""Bytes that a number counts for, and the least that an element of a collection takes."""
_STORABLE = frozenset((str, bytes, int, float, bool, type(None)))
_PAUSE = 0.5
"""Seconds until the next attempt after storing failed: short enough not to delay an epoch noticeably, long
enough not to load a file system in trouble."""


class EpochDeadLetters:
    """The dead letters of one task that are not stored yet. Used by the worker's loop only."""

    def __init__(self, context: Context, clock: Clock) -> None:
        self._context, self._clock = context, clock
        self._dead_letters: list[tuple[tuple[Any, ...], Failure]] = []
        self._bytes = self._part = 0
        self._is_reported = False
        self.epoch = 0
        """The epoch that the task processes."""
        self.wake_at: float | None = None
        """Storing failed, and is not tried again before this time (monotonic); None: the last attempt
        succeeded."""

    def add(self, values: Sequence[Any], error: str, bounded: bool = True) -> None:
        """Add a dead letter. If ``bounded``, long values are truncated, and the dead letter says so; otherwise
        it holds the whole tuple."""
        sized = [_bounded(value) if bounded else (value, _text_size(value)) for value in values]
        self._dead_letters.append((tuple(value for value, _ in sized), Failure(self._context.component, error)))
        self._bytes += len(error) + sum(size for _, size in sized)

    @property
    def full(self) -> bool:
        """True if the dead letters must be stored before the task processes more tuples."""
        return len(self._dead_letters) >= _MOST_DEAD_LETTERS or self._bytes >= _MOST_BYTES

    @property
    def waits(self) -> bool:
        """True if there is no room for more dead letters and the next attempt to store them is not due yet."""
        return self.full and self.wake_at is not None and self._clock.monotonic() < self.wake_at

    def store(self) -> bool:
        """Store all dead letters. Returns False if that is not possible now; the caller tries again later. The
        first failure is reported."""
        if not self._dead_letters:
            return True
        now = self._clock.monotonic()
        if self.wake_at is not None and now < self.wake_at:
            return False
        rows, failures = zip(*self._dead_letters, strict=True)
        try:
            self._context.add_dead_letters(rows, failures, once=epoch_dead_letters(self.epoch, self._part))
        except (OSError, PenstockError) as error:
            self.wake_at = now + _PAUSE
            if not self._is_reported:
                self._is_reported = True
                self._context.report(_not_stored(self._context, error))
            return False
        self._dead_letters, self._bytes, self.wake_at, self._is_reported = [], 0, None, False
        self._part += 1
        return True

    def begin(self, epoch: int) -> None:
        """Called when an epoch begins: the following dead letters belong to it."""
        self.epoch, self._part = epoch, 0


def _bounded(value: Any) -> tuple[Any, int]:
    """A value for a dead letter, and its size in bytes. Numbers and short texts are returned unchanged. A long
    text is truncated. Any other large value becomes a short text, because an instance of a user's class may have
    any size when it is pickled."""
    if isinstance(value, str | bytes) and len(value) > _MOST_VALUE:
        suffix = f"… (truncated: {len(value):,} in all)"
        beginning = value[:_MOST_VALUE]
        return (beginning + suffix if isinstance(beginning, str) else beginning + suffix.encode()), _MOST_VALUE
    if type(value) in _STORABLE:
        return value, _text_size(value)
    if isinstance(value, list | tuple | dict | set | frozenset) and len(value) > _MOST_VALUE // _SMALL:
        text = f"{bounded_repr(value)} (truncated: {len(value):,} elements)"
        return text, len(text)
    size = _stored_size(value)
    if size is not None and size <= _MOST_VALUE:
        return value, size
    text = bounded_repr(value) + ("" if size is None else f" (truncated: {size:,} bytes)")
    return text, len(text)


def _text_size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes) else _SMALL


def _stored_size(value: Any) -> int | None:
    """The size in bytes of a value as it is stored. None if it cannot be pickled."""
    try:
        return len(encode(ReplayRecord((value,), 0, "", "", 0.0)))
    except Exception:  # pickling runs users' code
        return None


def _not_stored(context: Context, error: Exception) -> ComponentError:
    return ComponentError(
        f"component '{context.component}' (task {context.task})",
        f"a tuple cannot be given up, because its dead letter cannot be stored: {error}",
        "The epoch waits until the state directory can be written to.",
    )
