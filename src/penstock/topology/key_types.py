"""Which types can be a key, and the plain value to which each of them is reduced before hashing.

Two keys that are equal in Python must have the same hash, so a type is accepted only if its equality is known. The
class that defines ``__eq__`` decides: a subclass that does not change equality is treated as its base class (an
``IntEnum`` as an int, a named tuple as a tuple); a class with its own equality is rejected.

Values are reduced to the types that ``penstock.topology.hashing`` hashes column by column: None, integers, floats,
other numbers, texts, bytes, and sequences and unordered collections of these.
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
    """How the values of one type are hashed: as plain values of ``kind``, after ``reduce`` if it is set."""

    kind: str
    """``none``, ``int``, ``float``, ``number``, ``text``, ``bytes``, ``sequence``, ``unordered`` or ``any``."""
    reduce: Callable[[Any], Any] | None = None


_EPOCH = dt.datetime(1970, 1, 1)
_MICROSECOND = dt.timedelta(microseconds=1)
_MINUTE = dt.timedelta(minutes=1)
ATTOSECONDS = 10**12
"""Attoseconds per microsecond. Fractions of a microsecond are expressed in attoseconds."""
_FINER = {"ns": 10**3, "ps": 10**6, "fs": 10**9, "as": 10**12}  # units of numpy, and how many are in a microsecond

NAIVE, INSTANT, TIME, DURATION = "naive", "instant", "time", "duration"
"""The first elements of the sequences that represent dates and times. ``hashing`` also uses them for Arrow
columns."""


def form_of(kind: type) -> Form:
    """The form of a type. Raises ``KeyTypeError`` if values of the type cannot be keys."""
    form = _known.get(kind)
    if form is None:
        form = _known[kind] = _find(kind)
    return form


def rejected(name: str) -> KeyTypeError:
    """The error for a key of this type. Callers add the name of the field."""
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
    # A numpy duration equals an integer, but which one depends on its unit.
    if issubclass(kind, np.bool_ | np.number) and not issubclass(kind, np.timedelta64):
        return Form("any", methodcaller("item"))
    raise rejected(f"{kind.__module__}.{kind.__qualname__}")


def _shorter(value: Any) -> Any:
    """Convert a long double to the equal float of half its size. Raises if there is none."""
    short = complex(value) if isinstance(value, np.clongdouble) else float(value)
    if short == value or value != value:
        return short
    raise rejected(f"numpy.{type(value).__name__} with more digits than a float has")


def _compares_fields(owner: type) -> bool:
    """Whether this is a dataclass with the generated ``__eq__``."""
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
    # Python ignores fold when it compares or hashes two times of the same zone.
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
    # A date is reduced to its midnight, because a numpy day can equal both.
    return NAIVE, (value - _EPOCH.date()) // _MICROSECOND


def _time(value: dt.time) -> tuple[Any, ...]:
    offset = value.replace(fold=0).utcoffset()
    # the rule by which Python compares times
    minutes = value.hour * 60 + value.minute - (0 if offset is None else offset // _MINUTE)
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
# By name, because importing pandas is slow and most processes do not need it
_PANDAS: Mapping[tuple[str, str], Form] = {
    ("pandas._libs.tslibs.timestamps", "_Timestamp"): Form("sequence", _pandas_time),
    ("pandas._libs.tslibs.timedeltas", "_Timedelta"): Form("sequence", _pandas_duration),
}
_known: dict[type, Form] = {type(None): Form("none")}
