"""Who owns a key when the number of tasks changes (SPEC 4).

The owner of a key with hash h among n tasks is h mod n. So doubling sends each key of a task to that task or to
exactly one new one, halving merges pairs, and any other change is right too, only with more sources for a task.
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
"""The hash of each state key, as the grouping hashes the fields it stands for."""


def sources(index: int, before: int, now: int) -> tuple[int, ...]:
    """Of ``before`` tasks those that may hold keys of task ``index`` of ``now``: doubling has one, halving two."""
    step = math.gcd(before, now)
    return tuple(range(index % step, before, step))


@dataclass(frozen=True)
class Share:
    """What a task takes over of the state of the tasks before it. Without a ``hash`` keys have no owner, as behind
    a shuffle grouping: then the first tasks keep what they have, and tasks that are no more leave theirs to the
    one of their number mod ``now``. With ``first`` the first task has everything, as behind a global grouping."""

    index: int
    before: int
    now: int
    hash: Hash | None = None
    first: bool = False
    one_field: bool = False
    """Keys are hashed by one field. Then a key that is a tuple might be its value, or begin with it."""

    @property
    def sources(self) -> tuple[int, ...]:
        """The tasks before of which it may take something."""
        if self.first:
            return () if self.index else tuple(range(self.before))
        if self.hash is not None:
            return sources(self.index, self.before, self.now)
        return tuple(range(self.index, self.before, self.now))

    def succeeds(self, source: int) -> bool:
        """Whether what task ``source`` had as a whole, keys or not, goes to this task."""
        return not self.index if self.first else source % self.now == self.index

    def of(self, keys: pa.Array, source: int, state: str) -> npt.NDArray[np.bool_]:
        """Which of the keys that task ``source`` had are this task's."""
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
        strangers = np.flatnonzero(hashes % np.uint64(self.before) != np.uint64(source))
        if len(strangers):
            (key,) = to_values(keys[int(strangers[0]) :][:1])
            raise _foreign_key(state, f"that grouping would not have sent {key!r} to task {source}")
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
                "Use state.map(..., owner=lambda key: key) where the field's value is the whole tuple, or"
                " owner=lambda key: key[0] where the tuple begins with it.",
            )


def _foreign_key(state: str, got: str) -> StateError:
    return StateError(
        f"state {state!r}",
        f"a map's keys must be the fields that its bolt's input is grouped by, or begin with them, but {got}",
        "Say with state.map(..., owner=...) which part of a key they are, or keep the number of tasks.",
    )
