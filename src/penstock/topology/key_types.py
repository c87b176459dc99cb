"""Which types can be a key, and the plain value that stands for each of them when it is hashed.

Two keys that are equal in Python must have the same hash. So a type is accepted only if its equality is known.
The class that defines ``__eq__`` decides: a subclass that does not change equality is treated as its base (an
``IntEnum`` as an int, a named tuple as a tuple), one with an equality of its own is rejected.

Values are reduced to what ``penstock.topology.hashing`` can hash column by column: None, integers, floats, other
numbers, texts, bytes, sequences and unordered collections of these.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import fractions
import ipaddress
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import KeyTypeError


class Form(NamedTuple):
    """How values of one type are hashed: as this kind of plain value, after ``reduce`` where there is one."""

    kind: str
    """``none``, ``int``, ``float``, ``number``, ``text``, ``bytes``, ``sequence``, ``unordered`` or ``any``."""
    reduce: Callable[[Any], Any] | None = None


_EPOCH = dt.datetime(1970, 1, 1)
_MICROSECOND = dt.timedelta(microseconds=1)
_MINUTE = dt.timedelta(minutes=1)
ATTOSECONDS = 10**12
"""In a microsecond. What is finer than a microsecond is given in these."""
_FINER = {"ns": 10**3, "ps": 10**6, "fs": 10**9, "as": 10**12}  # numpy's units, and how many are in a microsecond

NAIVE, INSTANT, TIME, DURATION = "naive", "instant", "time", "duration"
"""First parts of the sequences that stand for dates and times; ``hashing`` uses them for Arrow's columns too."""


def form_of(kind: type) -> Form:
    """The form of a type. Raises ``KeyTypeError`` for one that cannot be a key."""
    form = _known.get(kind)
    if form is None:
        form = _known[kind] = _find(kind)
    return form


def rejected(name: str) -> KeyTypeError:
    """The error for a key of the type of that name. Callers put the field in front."""
    return KeyTypeError(
        "key",
        f"a {name} cannot be a value that tuples are grouped by, because its equality is not known",
        "Emit a text, a number or a tuple of them instead, such as its id."
        " The types that can be a key are listed in docs/reference/groupings.md.",
    )


def _find(kind: type) -> Form:
    if issubclass(kind, np.generic):
        return _numpy(kind)
    owner = next(base for base in kind.__mro__ if "__eq__" in vars(base))
    form = _BY_EQUALITY.get(owner) or _PANDAS.get((owner.__module__, owner.__name__))
    if form is not None:
        return form
    if owner is object and issubclass(kind, enum.Enum):
        member = attrgetter("_value_" if issubclass(kind, enum.Flag) else "_name_")
        return Form("sequence", partial(_member, kind.__qualname__, member))
    if _compares_fields(owner):
        names = [field.name for field in fields(owner) if field.compare]
        return Form("sequence", partial(_record, kind.__qualname__, names))
    raise rejected(f"{kind.__module__}.{kind.__qualname__}")


def _numpy(kind: type) -> Form:
    if issubclass(kind, np.str_):
        return Form("text", str)
    if issubclass(kind, np.bytes_):
        return Form("bytes", bytes)
    if issubclass(kind, np.longdouble | np.clongdouble):
        return Form("number", _shorter)
    if issubclass(kind, np.datetime64):
        return Form("sequence", _numpy_time)
    # A numpy duration equals whole numbers, and which one depends on its unit.
    if issubclass(kind, np.bool_ | np.number) and not issubclass(kind, np.timedelta64):
        return Form("any", methodcaller("item"))
    raise rejected(f"{kind.__module__}.{kind.__qualname__}")


def _shorter(value: Any) -> Any:
    """A long double as the number of half its size that equals it. Raises where there is none."""
    short = complex(value) if isinstance(value, np.clongdouble) else float(value)
    if short == value or value != value:
        return short
    raise rejected(f"numpy.{type(value).__name__} with more digits than a float has")


def _compares_fields(owner: type) -> bool:
    """Is this a dataclass whose equality is the generated one?"""
    parameters = vars(owner).get("__dataclass_params__")
    code = getattr(vars(owner)["__eq__"], "__code__", None)
    return bool(parameters and parameters.eq and code is not None and code.co_filename == "<string>")


def _record(name: str, names: list[str], value: Any) -> tuple[Any, ...]:
    return name, *(getattr(value, field) for field in names)


def _member(name: str, member: Callable[[Any], Any], value: Any) -> tuple[Any, ...]:
    return name, member(value)


def _since_epoch(value: dt.datetime) -> int:
    return (value.replace(tzinfo=None) - _EPOCH) // _MICROSECOND


def _datetime(value: dt.datetime) -> tuple[Any, ...]:
    # Python compares two times of one zone without looking at fold; its own hash leaves it out as well.
    value = value.replace(fold=0)
    offset = value.utcoffset()
    if offset is None:
        return NAIVE, _since_epoch(value)
    return INSTANT, _since_epoch(value) - offset // _MICROSECOND


def _pandas_time(value: Any) -> tuple[Any, ...]:
    offset = value.utcoffset()
    moment = _since_epoch(value.to_pydatetime(warn=False))
    if offset is not None:
        moment -= offset // _MICROSECOND
    return _moment(NAIVE if offset is None else INSTANT, moment, value.nanosecond, 1000)


def _pandas_duration(value: Any) -> tuple[Any, ...]:
    return _moment(DURATION, value.to_pytimedelta() // _MICROSECOND, value.nanoseconds, 1000)


def _numpy_time(value: Any) -> tuple[Any, ...]:
    unit, step = np.datetime_data(value.dtype)
    if np.isnat(value) or unit == "generic":
        raise rejected("numpy.datetime64 without a value")
    if unit in _FINER:
        moment, rest = divmod(int(value.astype(np.int64)) * step, _FINER[unit])
        return _moment(NAIVE, moment, rest, _FINER[unit])
    return NAIVE, int(value.astype("datetime64[us]").astype(np.int64))


def _moment(tag: str, microseconds: int, rest: int, per_microsecond: int) -> tuple[Any, ...]:
    return (tag, microseconds, rest * (ATTOSECONDS // per_microsecond)) if rest else (tag, microseconds)


def _date(value: dt.date) -> tuple[Any, ...]:
    # As its midnight: numpy has days that equal both.
    return NAIVE, (value - _EPOCH.date()) // _MICROSECOND


def _time(value: dt.time) -> tuple[Any, ...]:
    offset = value.replace(fold=0).utcoffset()
    minutes = value.hour * 60 + value.minute - (0 if offset is None else offset // _MINUTE)  # as Python compares
    return TIME, (minutes * 60 + value.second) * 1_000_000 + value.microsecond


def _timedelta(value: dt.timedelta) -> tuple[Any, ...]:
    return DURATION, value // _MICROSECOND


_BY_EQUALITY: dict[type, Form] = {
    int: Form("int"),
    float: Form("float"),
    complex: Form("number"),
    decimal.Decimal: Form("number"),
    fractions.Fraction: Form("number"),
    str: Form("text"),
    bytes: Form("bytes"),
    bytearray: Form("bytes", bytes),
    tuple: Form("sequence"),
    list: Form("sequence"),
    set: Form("unordered", list),
    frozenset: Form("unordered", list),
    dict: Form("unordered", lambda value: list(value.items())),
    OrderedDict: Form("unordered", lambda value: list(value.items())),
    dt.datetime: Form("sequence", _datetime),
    dt.date: Form("sequence", _date),
    dt.time: Form("sequence", _time),
    dt.timedelta: Form("sequence", _timedelta),
    uuid.UUID: Form("sequence", lambda value: ("uuid", value.bytes)),
}
_BY_EQUALITY.update(
    {
        base: Form("sequence", lambda value: ("address", str(value)))
        for kind in vars(ipaddress).values()
        if isinstance(kind, type) and kind.__name__.startswith("IP")
        for base in kind.__mro__
        if base is not object and "__eq__" in vars(base)
    }
)
_PANDAS: Mapping[tuple[str, str], Form] = {  # by name: pandas is slow to import, and not every process needs it
    ("pandas._libs.tslibs.timestamps", "_Timestamp"): Form("sequence", _pandas_time),
    ("pandas._libs.tslibs.timedeltas", "_Timedelta"): Form("sequence", _pandas_duration),
}
_known: dict[type, Form] = {type(None): Form("none")}
