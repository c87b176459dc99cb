"""Distributes keys when the number of tasks changes.

The owner of a key with hash h among n tasks is task h mod n. Doubling therefore sends each key of a task to that
task or to exactly one new task, and halving merges pairs. Any other change works too, but a task then gets keys of
more tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.columns import is_pickled, to_values
from penstock.errors import KeyTypeError, StateError

Hash: TypeAlias = Callable[[pa.Array], npt.NDArray[np.uint64]]
"""The hash of each key of a state, equal to the hash that the grouping computes from the fields in the key."""


def sources(index: int, before: int, now: int) -> tuple[int, ...]:
    """The tasks among ``before`` that may hold keys of task ``index`` of ``now``. Doubling has one, halving
    two."""
    step = math.gcd(before, now)
    return tuple(range(index % step, before, step))


@dataclass(frozen=True)
class Share:
    """What a task takes over of the previous tasks' state. Without a ``hash`` keys have no owner, as with shuffle
    grouping: tasks keep their state, and removed tasks leave theirs to the task with their number mod ``now``.
    With ``first`` the first task takes everything, as with global grouping."""

    index: int
    before: int
    now: int
    hash: Hash | None = None
    first: bool = False
    one_field: bool = False
    """Keys are hashed by one field. A key that is a tuple could then be the value of the field, or begin with
    it."""

    @property
    def sources(self) -> tuple[int, ...]:
        """The previous tasks from which it may take state."""
        if self.first:
            return () if self.index else tuple(range(self.before))
        if self.hash is not None:
            return sources(self.index, self.before, self.now)
        return tuple(range(self.index, self.before, self.now))

    def succeeds(self, source: int) -> bool:
        """Whether everything of task ``source`` that does not belong to a key goes to this task."""
        return not self.index if self.first else source % self.now == self.index

    def of(self, keys: pa.Array, source: int, state: str) -> npt.NDArray[np.bool_]:
        """Which of the keys of task ``source`` belong to this task. Raises ``StateError`` for keys that the
        grouping would not have sent to ``source``."""
        if self.hash is None:
            return np.ones(len(keys), np.bool_)
        if self.one_field and is_pickled(keys):
            self._check_distinguishable(keys, state)
        try:
            hashes = self.hash(keys)
        except LookupError:
            raise _foreign_key(state, "a key has fewer parts than there are fields") from None
        except KeyTypeError as error:
            raise _foreign_key(state, error.problem) from None
        foreign = np.flatnonzero(hashes % np.uint64(self.before) != np.uint64(source))
        if len(foreign):
            (key,) = to_values(keys[int(foreign[0]) :][:1])
            raise _foreign_key(state, f"the grouping would not have sent {key!r} to task {source}")
        mine: npt.NDArray[np.bool_] = hashes % np.uint64(self.now) == np.uint64(self.index)
        return mine

    @staticmethod
    def _check_distinguishable(keys: pa.Array, state: str) -> None:
        key = next((key for key in to_values(keys) if isinstance(key, tuple)), None)
        if key is not None:
            raise StateError(
                f"state {state!r}",
                f"the input is grouped by one field, but the map has the tuple {key!r} as a key "
                "and does not say which part of it is the field",
                "Use state.map(..., owner=lambda key: key) if the value of the field is the whole tuple, or "
                "owner=lambda key: key[0] if the tuple begins with it.",
            )


def _foreign_key(state: str, got: str) -> StateError:
    return StateError(
        f"state {state!r}",
        f"the keys of a map must be or begin with the fields that the bolt's input is grouped by, but {got}",
        "Pass owner=... to state.map to extract these fields from a key, or keep the number of tasks.",
    )
