"""Dead letters of tuples that a task gives up under exactly-once delivery.

No spout emits such a tuple again, so its dead letter must be stored before the epoch is committed. An epoch that
is processed again after a restart produces its dead letters again. Dead letters therefore carry their generation
and epoch, and are valid only if that generation committed that epoch (``replay.stored_letters``).
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
        kept = tuple(map(_bounded, values)) if bounded else tuple(values)
        self._dead_letters.append((kept, Failure(self._context.component, error)))
        self._bytes += len(error) + sum(len(value) if isinstance(value, str | bytes) else 64 for value in kept)

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


def _bounded(value: Any) -> Any:
    """The value as it is stored: the beginning of a long text, a shortened text for a collection with many
    elements or a value that cannot be pickled, and any other value unchanged."""
    if isinstance(value, str | bytes) and len(value) > _MOST_VALUE:
        suffix = f"… (truncated: {len(value):,} in all)"
        return value[:_MOST_VALUE] + suffix if isinstance(value, str) else value[:_MOST_VALUE] + suffix.encode()
    if isinstance(value, list | tuple | dict | set | frozenset) and len(value) > _MOST_VALUE // 64:
        return f"{bounded_repr(value)} (truncated: {len(value):,} elements)"
    return value if type(value) in _STORABLE or _can_be_stored(value) else bounded_repr(value)


def _can_be_stored(value: Any) -> bool:
    """False if the value cannot be pickled."""
    try:
        encode(ReplayRecord((value,), 0, "", "", 0.0))
    except Exception:  # pickling runs users' code
        return False
    return True


def _not_stored(context: Context, error: Exception) -> ComponentError:
    return ComponentError(
        f"component '{context.component}' (task {context.task})",
        f"a tuple cannot be given up, because its dead letter cannot be stored: {error}",
        "The epoch waits until the state directory can be written to.",
    )
