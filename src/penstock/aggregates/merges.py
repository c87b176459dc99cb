"""Merges: aggregates that several tasks compute as partials, which are combined downstream.

A partial is computed from some of the values. Merging partials gives the partial of all their values,
independently of how the values were split and of the order of merging. All results are exact, including those of
floats: ``Sum`` returns the true sum, rounded once (like ``math.fsum``), and identical to the last bit for every
split. Only ``Variance`` rounds intermediate results: its relative error is below 1e-9 unless the values differ by
less than a millionth of their size. Sums beyond the range of a float are infinite.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from fractions import Fraction
from functools import reduce
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import numpy as np

from penstock.errors import TopologyError

__all__ = ["Count", "CountOf", "Distinct", "Max", "Mean", "Merge", "Min", "Sum", "TopK", "Variance"]

_EXACT_INTS = 2**53  # every integer up to here is representable as a float, and every larger float is an integer

P = TypeVar("P")
R = TypeVar("R")


class Merge(ABC, Generic[P, R]):
    """One kind of aggregate. ``P`` is the type of its partials, ``R`` the type of its result.

    A partial is a plain value that can be pickled: it is sent in a field of a tuple and kept in task state.
    Numbers, strings and tuples of them are preferable, because an immutable partial is cheapest in a snapshot.
    ``merge`` must be associative and commutative, ``zero()`` its neutral element, and ``add(partial, value)``
    equal to merging with the partial of that value.

    ``add`` and ``merge`` may change and return their first argument, but must not change the second. Bolts do not
    pass None and NaN to a merge: such a field has no value.
    """

    field: str | None = None
    """The field whose values are aggregated. None: tuples are counted, and each value is None."""

    repeatable: ClassVar[bool] = False
    """Whether merging the same partial into another one twice is the same as doing it once, as for sets. Then a
    partial in the state may be changed before it is known that the whole batch succeeds."""

    def __init__(self, field: str | None = None) -> None:
        self.field = field

    @abstractmethod
    def zero(self) -> P:
        """The partial of no values; a new object each time if partials are mutable."""

    @abstractmethod
    def add(self, partial: P, value: Any) -> P:
        """The partial with one more value."""

    @abstractmethod
    def merge(self, partial: P, other: P) -> P:
        """The partial of the values of both partials."""

    @abstractmethod
    def result(self, partial: P) -> R:
        """The result of a partial. Must not change it."""

    def total(self, values: Sequence[Any]) -> P:
        """The partial of many values, equal to adding them one after the other to ``zero``. Bolts call this
        method; override it if there is a faster way."""
        partial = self.zero()
        for value in values:
            partial = self.add(partial, value)
        return partial


class Count(Merge[int, int]):
    """The number of tuples, or of tuples that have a value in the field."""

    def zero(self) -> int:
        return 0

    def add(self, partial: int, value: Any) -> int:
        return partial + 1

    def merge(self, partial: int, other: int) -> int:
        return partial + other

    def result(self, partial: int) -> int:
        return partial

    def total(self, values: Sequence[Any]) -> int:
        return len(values)


class CountOf(Count):
    """The number of tuples that have this value in the field."""

    def __init__(self, field: str, value: Any) -> None:
        super().__init__(field)
        self.value = value

    def add(self, partial: int, value: Any) -> int:
        return partial + bool(value == self.value)

    def total(self, values: Sequence[Any]) -> int:
        return values.count(self.value)


class FieldMerge(Merge[P, R]):
    """A merge that always reads a field."""

    def __init__(self, field: str) -> None:
        super().__init__(field)


Total: TypeAlias = Any
"""An exact sum: a number if it contains no float, otherwise ⟨sum of the others, float, float …⟩, where the sum of
the floats is exactly the sum of all float values (usually one or two floats)."""


class Sum(FieldMerge[Total, Any]):
    """The sum of the field; 0 if there are no values."""

    def zero(self) -> Total:
        return 0

    def add(self, partial: Total, value: Any) -> Total:
        return _add(partial, _sum((value,)))

    def merge(self, partial: Total, other: Total) -> Total:
        return _add(partial, other)

    def result(self, partial: Total) -> Any:
        return _rounded(partial)

    def total(self, values: Sequence[Any]) -> Total:
        return _sum(values)


class Mean(FieldMerge[tuple[Total, int], float | None]):
    """The mean of the field; None if there are no values. Its partial is ⟨sum, count⟩ (*Sun 2022*, Eq. 7)."""

    def zero(self) -> tuple[Total, int]:
        return 0, 0

    def add(self, partial: tuple[Total, int], value: Any) -> tuple[Total, int]:
        return self.merge(partial, self.total((value,)))

    def merge(self, partial: tuple[Total, int], other: tuple[Total, int]) -> tuple[Total, int]:
        return _add(partial[0], other[0]), partial[1] + other[1]

    def result(self, partial: tuple[Total, int]) -> float | None:
        total, count = partial
        if not count:
            return None
        if isinstance(total, tuple) and total[0]:
            return _float(_true(total) / count) if all(map(math.isfinite, total[1:])) else math.fsum(total[1:])
        mean: float = _rounded(total) / count
        return mean

    def total(self, values: Sequence[Any]) -> tuple[Total, int]:
        return _sum(values), len(values)


Spread: TypeAlias = tuple[int, float, float]
"""⟨n, mean, M2⟩, where M2 is the sum of the squared distances from the mean."""


class Variance(FieldMerge[Spread, float | None]):
    """The population variance of the field (as ``statistics.pvariance``); None if there are no values."""

    def zero(self) -> Spread:
        return 0, 0.0, 0.0

    def add(self, partial: Spread, value: Any) -> Spread:
        return self.merge(partial, (1, float(value), 0.0))

    def merge(self, partial: Spread, other: Spread) -> Spread:
        """By Chan, Golub and LeVeque (1979), based on the mean of the larger partial, which changes least."""
        (few, far, squares), (many, mean, more) = sorted((partial, other))
        n = few + many
        if not few:
            return many, mean, more
        apart = far - mean
        return n, mean + apart * few / n, squares + more + apart * apart * few * many / n

    def result(self, partial: Spread) -> float | None:
        return partial[2] / partial[0] if partial[0] else None

    def total(self, values: Sequence[Any]) -> Spread:
        n = len(values)
        if not n:
            return self.zero()
        mean = math.fsum(values) / n
        return n, mean, math.fsum([(value - mean) ** 2 for value in values])


class Min(FieldMerge[Any, Any]):
    """The smallest value of the field; None if there are no values."""

    def zero(self) -> Any:
        return None

    def add(self, partial: Any, value: Any) -> Any:
        return value if partial is None or value < partial else partial

    def merge(self, partial: Any, other: Any) -> Any:
        return partial if other is None else self.add(partial, other)

    def result(self, partial: Any) -> Any:
        return partial

    def total(self, values: Sequence[Any]) -> Any:
        return min(values, default=None)


class Max(Min):
    """The largest value of the field; None if there are no values."""

    def add(self, partial: Any, value: Any) -> Any:
        return value if partial is None or value > partial else partial

    def total(self, values: Sequence[Any]) -> Any:
        return max(values, default=None)


class Distinct(FieldMerge[set[Any], int]):
    """The exact number of distinct values of the field. Its partial is the set of them."""

    repeatable = True

    def zero(self) -> set[Any]:
        return set()

    def add(self, partial: set[Any], value: Any) -> set[Any]:
        partial.add(value)
        return partial

    def merge(self, partial: set[Any], other: set[Any]) -> set[Any]:
        partial |= other
        return partial

    def result(self, partial: set[Any]) -> int:
        return len(partial)

    def total(self, values: Sequence[Any]) -> set[Any]:
        return set(values)


class TopK(FieldMerge[dict[Any, int], list[tuple[Any, int]]]):
    """The ``k`` most frequent values of the field with their counts, most frequent first. Equally frequent values
    are sorted in ascending order (by ``repr`` if they cannot be compared). Exact: its partial counts all
    values."""

    def __init__(self, field: str, k: int = 10) -> None:
        super().__init__(field)
        if not isinstance(k, int) or k < 1:
            raise TopologyError(f"TopK({field!r}, {k!r})", f"k must be a whole number of at least 1, not {k!r}")
        self.k = k

    def zero(self) -> dict[Any, int]:
        return {}

    def add(self, partial: dict[Any, int], value: Any) -> dict[Any, int]:
        partial[value] = partial.get(value, 0) + 1
        return partial

    def merge(self, partial: dict[Any, int], other: dict[Any, int]) -> dict[Any, int]:
        for value, count in other.items():
            partial[value] = partial.get(value, 0) + count
        return partial

    def result(self, partial: dict[Any, int]) -> list[tuple[Any, int]]:
        if not partial:
            return []
        least = heapq.nlargest(self.k, partial.values())[-1]
        chosen = [item for item in partial.items() if item[1] >= least]  # independent of the order of arrival
        try:
            chosen.sort(key=lambda item: (-item[1], item[0]))
        except TypeError:
            chosen.sort(key=lambda item: (-item[1], repr(item[0])))
        return chosen[: self.k]

    def total(self, values: Sequence[Any]) -> dict[Any, int]:
        return dict(Counter(values))


# -- exact sums


_DECIMALS = Context(prec=10_000, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
"""The context in which Decimals are added: precise enough not to round usual values, so the order has no
effect."""


def _sum(values: Sequence[Any]) -> Total:
    kinds = set(map(type, values))
    if kinds == {float}:
        return _with_floats(0, values)
    if kinds <= {int}:
        return sum(values)
    # Converted to Python numbers, because numpy's integers overflow.
    values = [value.item() if isinstance(value, np.generic) else value for value in values]
    floats = [value for value in values if isinstance(value, float)]
    others = reduce(_plus, (value for value in values if not isinstance(value, float)), 0)
    return _with_floats(others, floats) if floats else others


def _add(one: Total, other: Total) -> Total:
    if not isinstance(one, tuple) and not isinstance(other, tuple):
        return _plus(one, other)
    first = one if isinstance(one, tuple) else (one,)
    second = other if isinstance(other, tuple) else (other,)
    return _with_floats(_plus(first[0], second[0]), first[1:] + second[1:])


def _plus(one: Any, other: Any) -> Any:
    if isinstance(one, Decimal) or isinstance(other, Decimal):
        return _DECIMALS.add(one, other)
    return one + other


def _with_floats(others: Any, floats: Sequence[float]) -> Total:
    try:
        return (others, *_exact(floats))
    except OverflowError:  # floats of this size are integers, and Python's integers have no limit
        large = [value for value in floats if abs(value) >= _EXACT_INTS]
        return reduce(_plus, map(int, large), others), *_exact([v for v in floats if abs(v) < _EXACT_INTS])


def _rounded(total: Total) -> Any:
    """The sum, rounded once. An integer that a float cannot represent is not converted before it is added."""
    if not isinstance(total, tuple):
        return total
    others, *floats = total
    if not others or (isinstance(others, int) and abs(others) <= _EXACT_INTS):
        return math.fsum(total)
    return _float(_true(total)) if all(map(math.isfinite, floats)) else math.fsum(floats)


def _true(total: tuple[Any, ...]) -> Any:
    if isinstance(total[0], complex):
        return total[0] + math.fsum(total[1:])
    return sum(map(Fraction, total))


def _float(value: Any) -> Any:
    if isinstance(value, complex):
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _exact(values: Sequence[float]) -> Sequence[float]:
    """A few floats whose sum is exactly the sum of the values: the rounded sum, the rounding error, and so on
    until the error is zero. They depend only on the true sum, not on the order of the values. Raises
    ``OverflowError`` if an intermediate sum exceeds the range of a float."""
    if len(values) < 2:
        return tuple(filter(None, values))
    rounded, left = [], list(values)
    try:
        while rest := math.fsum(left):
            if not math.isfinite(rest):
                return (rest,)
            rounded.append(rest)
            left.append(-rest)
    except ValueError:  # infinities of both signs
        return (math.nan,)
    return rounded
