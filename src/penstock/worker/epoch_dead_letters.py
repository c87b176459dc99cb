"""Tuples that a task gives up exactly once: dead letters of the epoch in which that happened.

Nobody emits such a tuple again, so its dead letter must be stored before the epoch is committed. An epoch that is
done again after a restart gives up its tuples again: dead letters carry the generation and the epoch, and count
only if that generation committed that epoch (``replay.stored_letters``).
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

_MOST_DEAD_LETTERS = 1000  # kept in memory: one file of the store
_MOST_BYTES = 8 << 20  # the same in bytes, roughly
_MOST_VALUE = 64 << 10  # bytes or characters of one value in a dead letter; of a longer one its beginning is kept
_STORABLE = frozenset((str, bytes, int, float, bool, type(None)))
_PAUSE = 0.5  # s until a store that failed is asked again


class EpochDeadLetters:
    """What one task has given up and not stored yet."""

    def __init__(self, context: Context, clock: Clock) -> None:
        self._context, self._clock = context, clock
        self._dead_letters: list[tuple[tuple[Any, ...], Failure]] = []
        self._bytes = self._part = 0
        self._is_reported = False
        self.epoch = 0
        """The one that the task works on."""
        self.wake_at: float | None = None
        """The store failed; it is not asked before that time."""

    def add(self, values: Sequence[Any], error: str, bounded: bool = True) -> None:
        """``bounded``: long values are cut, which the dead letter says. Otherwise it holds all of the tuple."""
        kept = tuple(map(_bounded, values)) if bounded else tuple(values)
        self._dead_letters.append((kept, Failure(self._context.component, error)))
        self._bytes += len(error) + sum(len(value) if isinstance(value, str | bytes) else 64 for value in kept)

    @property
    def full(self) -> bool:
        """Store them now, or take no more tuples."""
        return len(self._dead_letters) >= _MOST_DEAD_LETTERS or self._bytes >= _MOST_BYTES

    @property
    def waits(self) -> bool:
        """There is no room for more, and the store failed a moment ago."""
        return self.full and self.wake_at is not None and self._clock.monotonic() < self.wake_at

    def store(self) -> bool:
        """Make dead letters of all. False: they cannot be stored now, which is reported once; try again later."""
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
        """The next tuples belong to this epoch."""
        self.epoch, self._part = epoch, 0


def _bounded(value: Any) -> Any:
    """Numbers and short texts as they are; of a long text or bytes the beginning, of another large value its
    shortened text: what a user's class pickles to may have any size."""
    if isinstance(value, str | bytes) and len(value) > _MOST_VALUE:
        cut = f"… (cut: {len(value):,} in all)"
        return value[:_MOST_VALUE] + cut if isinstance(value, str) else value[:_MOST_VALUE] + cut.encode()
    if isinstance(value, list | tuple | dict | set | frozenset) and len(value) > _MOST_VALUE // 64:
        return f"{bounded_repr(value)} (cut: {len(value):,} elements)"
    return value if type(value) in _STORABLE or _can_be_stored(value) else bounded_repr(value)


def _can_be_stored(value: Any) -> bool:
    """A value that a component emitted may be one that cannot be pickled."""
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
