"""Equal keys have equal hashes, whatever their type and process; other types are rejected."""

import datetime as dt
import enum
import ipaddress
import json
import math
import os
import subprocess
import sys
import uuid
from collections import Counter, OrderedDict, namedtuple
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Delivery, Settings, TopologyBuilder
from penstock.columns import PICKLED, to_column
from penstock.errors import KeyTypeError
from penstock.testing import CaptureBolt, FeederSpout, LocalRunner
from penstock.topology.hashing import hash_column

UTC = dt.UTC
BERLIN = ZoneInfo("Europe/Berlin")
PLUS_2 = dt.timezone(dt.timedelta(hours=2))


@dataclass(frozen=True)
class Place:
    city: str
    number: float
    note: str = field(default="", compare=False)


@dataclass(frozen=True)
class Other:
    city: str
    number: float


class Inherits(Place):
    pass


class Colour(enum.Enum):
    RED = 1
    ROUGE = 1  # noqa: PIE796 - an alias


class Level(enum.IntEnum):
    LOW = 1


class Text(str, enum.Enum):  # noqa: UP042 - as users write it
    A = "a"


class Bits(enum.Flag):
    ONE = 1
    TWO = 2


Point = namedtuple("Point", "x y")


class Folded(str):
    """Compares texts without regard to case, so its equality differs from that of str."""

    __slots__ = ()

    def __eq__(self, other):
        return self.lower() == other.lower()

    def __hash__(self):
        return hash(self.lower())


NOON = dt.datetime(2024, 7, 1, 12, 0, tzinfo=UTC)

EQUAL = {
    "dataclasses": (Place("a" + "b", 1, "x"), Place("ab", 1.0)),
    "frozensets": (frozenset(["a", "b", "c"]), frozenset(["c", "b", "a"])),
    "frozensets of tuples": (frozenset([(1, "a"), (2, "b")]), frozenset([(2.0, "b"), (1, "a")])),
    "uuids": (uuid.UUID(int=5), uuid.UUID("00000000-0000-0000-0000-000000000005")),
    "instants": (NOON, dt.datetime(2024, 7, 1, 14, 0, tzinfo=PLUS_2)),
    "instants of a zone": (NOON, dt.datetime(2024, 7, 1, 14, 0, tzinfo=BERLIN)),
    "a repeated hour": (
        dt.datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN),
        dt.datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN, fold=1),
    ),
    "naive": (dt.datetime(2024, 7, 1), dt.datetime(2024, 7, 1, fold=1)),
    "aware times": (dt.time(12, tzinfo=UTC), dt.time(14, tzinfo=PLUS_2)),
    "durations": (dt.timedelta(days=1), dt.timedelta(hours=24)),
    "pandas": (NOON, pd.Timestamp(NOON)),
    "pandas duration": (dt.timedelta(seconds=1), pd.Timedelta(seconds=1)),
    "numpy time": (dt.datetime(2024, 7, 1), np.datetime64("2024-07-01T00:00:00", "us")),
    "numpy day": (dt.date(2024, 7, 1), np.datetime64("2024-07-01")),
    "complex": (1, 1 + 0j),
    "complex float": (1.5, 1.5 + 0j),
    "numpy complex": (1 + 2j, np.complex128(1 + 2j)),
    "fraction": (0.5, Fraction(1, 2)),
    "decimal": (Decimal("0.5"), 0.5),
    "big decimal": (Decimal(2) ** 64, 2**64),
    "precise decimal": (Decimal("9223372036854775807.0000000000000000000"), 2**63 - 1),
    "zeros": (0.0, -0.0),
    "decimal zero": (Decimal("-0"), 0),
    "complex zero": (0, complex(-0.0, -0.0)),
    "infinities": (math.inf, Decimal("Infinity")),
    "least int": (-(2**63), -(2.0**63)),
    "beyond": (2**63, 2.0**63),
    "one": (True, np.uint8(1)),
    "levels": (1, Level.LOW),
    "text enum": ("a", Text.A),
    "enum alias": (Colour.RED, Colour.ROUGE),
    "flags": (Bits.ONE | Bits.TWO, Bits.TWO | Bits.ONE),
    "named tuples": (Point(1, 2), (1.0, 2)),
    "bytes": (b"ab", bytearray(b"ab")),
    "lists": ([1, "a"], [1.0, "a"]),
    "sets": ({1, 2}, frozenset([2, 1])),
    "dicts": ({"a": 1, "b": 2}, OrderedDict([("b", 2), ("a", 1)])),
    "addresses": (ipaddress.ip_address("::1"), ipaddress.ip_address("0:0::1")),
    "numpy text": (np.str_("ab"), "ab"),
    "numpy bytes": (np.bytes_(b"ab"), b"ab"),
    "half": (np.float16(0.5), 0.5),
    "long double": (np.longdouble(0.5), 0.5),
    "nested": ((frozenset([1]), (Place("a", 1),)), (frozenset([True]), (Place("a", 1.0),))),
}


def pickled(values):
    column = to_column([*values, object], None)
    assert column.type == PICKLED
    return column[: len(values)]


@pytest.mark.parametrize("pair", EQUAL.values(), ids=EQUAL)
def test_equal_keys_hash_alike(pair):
    one, other = pair
    assert one == other
    assert hash_column(to_column([one], None)).tolist() == hash_column(to_column([other], None)).tolist()
    together = hash_column(pickled([one, "between", other])).tolist()
    assert together[0] == together[2] == hash_column(pickled([one]))[0]


DIFFERENT = [
    *(None, 0, 1, 2**63, -(2**63), 2**64 + 1, 0.5, 0.1, Decimal("0.1"), Fraction(1, 3), 1j, "", "a", b"b"),
    *((), (1,), ((1,),), (1, 2), (2, 1), frozenset(), frozenset([1, 2]), frozenset([3]), {"a": 1}, {"a": 2}),
    *(Place("a", 1), Place("b", 1), Other("a", 1), Inherits("a", 1), Colour.RED, Bits.ONE, Bits.TWO),
    *(NOON, NOON.replace(tzinfo=None), dt.date(2024, 7, 1), dt.time(12), dt.time(13), dt.timedelta(1)),
    *(uuid.UUID(int=1), uuid.UUID(int=2), ipaddress.ip_address("1.2.3.4"), ipaddress.ip_network("1.2.3.4/32")),
]


def test_different_keys_hash_differently():
    hashes = hash_column(pickled(DIFFERENT)).tolist()
    assert len(set(hashes)) == len(DIFFERENT)


NANS = [
    math.nan,
    -math.nan,
    float("-nan"),
    np.float32("nan"),
    Decimal("NaN"),
    Decimal("sNaN"),
    complex(0, math.nan),
]


def test_all_nans_are_one_key():
    found = set(hash_column(pickled(NANS)).tolist())
    found |= set(hash_column(pa.array([math.nan, -math.nan, float("nan")])).tolist())
    found.add(hash_column(pa.array(np.array([0x7FF0000000000001], np.uint64).view(np.float64)))[0])
    assert len(found) == 1


moments = st.datetimes(dt.datetime(1700, 1, 1), dt.datetime(2200, 1, 1))
ARROW = {
    "us": (pa.timestamp("us"), moments),
    "ns": (pa.timestamp("ns"), moments),
    "ms": (pa.timestamp("ms"), moments.map(lambda value: value.replace(microsecond=7000))),
    "s": (pa.timestamp("s"), moments.map(lambda value: value.replace(microsecond=0))),
    "utc": (pa.timestamp("us", "UTC"), moments.map(lambda value: value.replace(tzinfo=UTC))),
    "zone": (pa.timestamp("us", "Europe/Berlin"), moments.map(lambda value: value.replace(tzinfo=UTC))),
    "zone ns": (pa.timestamp("ns", "Europe/Berlin"), moments.map(lambda value: value.replace(tzinfo=UTC))),
    "offset": (pa.timestamp("us", "+02:00"), moments.map(lambda value: value.replace(tzinfo=PLUS_2))),
    "date32": (pa.date32(), st.dates()),
    "date64": (pa.date64(), st.dates()),
    "time": (pa.time64("us"), st.times()),
    "time ns": (pa.time64("ns"), st.times()),
    "time s": (pa.time32("s"), st.times().map(lambda value: value.replace(microsecond=0))),
    "duration": (pa.duration("us"), st.timedeltas(dt.timedelta(-9999), dt.timedelta(9999))),
    "duration ns": (pa.duration("ns"), st.timedeltas(dt.timedelta(-9999), dt.timedelta(9999))),
    "decimal": (pa.decimal128(20, 3), st.decimals(-999, 999, places=3)),
    "decimal256": (pa.decimal256(50, 3), st.decimals(-999, 999, places=3)),
    "uint64": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "int8": (pa.int8(), st.integers(-128, 127)),
    "half": (pa.float16(), st.floats(width=16, allow_nan=False)),
    "float": (pa.float32(), st.floats(width=32, allow_nan=False)),
    "large text": (pa.large_string(), st.text("abc")),
    "text view": (pa.string_view(), st.text("abc")),
    "large bytes": (pa.large_binary(), st.binary()),
    "fixed bytes": (pa.binary(3), st.binary(min_size=3, max_size=3)),
    "uuid": (pa.uuid(), st.uuids()),
    "list": (pa.list_(pa.int64()), st.lists(st.integers(0, 9))),
    "struct": (pa.struct([("a", pa.int64())]), st.fixed_dictionaries({"a": st.integers(0, 9)})),
    "encoded": (pa.dictionary(pa.int32(), pa.timestamp("us")), moments),
    "bool": (pa.bool_(), st.booleans()),
}


@pytest.mark.parametrize("kind", ARROW)
@given(data=st.data())
def test_a_column_hashes_as_the_values_it_was_made_from(kind, data):
    arrow, values = ARROW[kind]
    chosen = data.draw(st.lists(st.one_of(st.none(), values), min_size=1, max_size=8))
    if pa.types.is_dictionary(arrow):
        column = pa.array(chosen, arrow.value_type).dictionary_encode()
    elif kind == "uuid":
        column = pa.array([None if value is None else value.bytes for value in chosen], pa.binary(16)).cast(arrow)
    else:
        column = pa.array(chosen, arrow)
    expected = hash_column(pickled(chosen)).tolist()
    assert hash_column(column).tolist() == expected
    assert hash_column(column[1:]).tolist() == expected[1:]
    # A bolt for single tuples gets this value and may use it as a key of its state: the owner is the same.
    assert hash_column(pickled(column.to_pylist())).tolist() == expected


def test_nanoseconds_count():
    column = pa.array([1_000, 1_001, 1_002], pa.timestamp("ns", "UTC"))
    assert len(set(hash_column(column).tolist())) == 3
    assert hash_column(pickled(column.to_pylist())).tolist() == hash_column(column).tolist()
    assert hash_column(pickled([np.datetime64(1_001, "ns")])) == hash_column(pa.array([1_001], pa.timestamp("ns")))


def test_the_least_int_is_one_key_in_every_column():
    least = -(2**63)
    mixed = hash_column(pickled([least, "x"]))[0]
    assert hash_column(pa.array([least]))[0] == mixed == hash_column(pa.array([float(least)]))[0]


_ELSEWHERE = """
import json, sys
from tests.property.test_key_types import DIFFERENT, EQUAL, pickled
from penstock.topology.hashing import hash_column
keys = [*DIFFERENT, *(value for pair in EQUAL.values() for value in pair)]
print(json.dumps(hash_column(pickled(keys)).tolist()))
"""


def test_every_process_hashes_alike():
    """The order of texts in sets depends on the seed of Python's own hash."""
    here = hash_column(pickled([*DIFFERENT, *(value for pair in EQUAL.values() for value in pair)])).tolist()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", _ELSEWHERE],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout) == here


class Plain:
    """Instances are never equal."""


@dataclass
class OwnEquality:
    a: int

    def __eq__(self, other):
        return True


REJECTED = [
    (Plain(), "Plain"),
    (Folded("A"), "Folded"),
    (OwnEquality(1), "OwnEquality"),
    (np.timedelta64(1, "s"), "timedelta64"),
    (np.datetime64("NaT"), "datetime64"),
    (Counter("a"), "Counter"),
    (np.array([1, 2]), "ndarray"),
    (int, "type"),
    (range(3), "range"),
]


@pytest.mark.parametrize(("value", "name"), REJECTED, ids=[name for _, name in REJECTED])
def test_other_types_are_rejected(value, name):
    for key in (value, (1, value), [value], {"a": value}):
        with pytest.raises(KeyTypeError, match=name):
            hash_column(pickled([key]))


@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize("grouping", ["fields_grouping", "partial_key_grouping"])
def test_a_tuple_with_such_a_key_fails_alone(tasks, grouping):
    builder = TopologyBuilder()
    rows = [(n, f"k{n}" if n % 10 else Folded("A")) for n in range(30)]
    builder.set_spout("words", FeederSpout("n", "key", rows=rows))
    getattr(builder.set_bolt("count", CaptureBolt(), tasks), grouping)("words", "key")
    runner = LocalRunner(builder.build("t", Settings(delivery=Delivery("at_least_once"))))
    runner.run_until_idle()
    assert sorted(tup.n for tup in runner.captured("count")) == [n for n in range(30) if n % 10]
    (spout,) = runner.component("words")
    assert sorted(n for n, _ in spout.failed) == [0, 10, 20]
    assert str(runner.errors[0]) == (
        "component 'words', field 'key': a tests.property.test_key_types.Folded cannot be a value that tuples are"
        " grouped by, because its equality is not known. Emit a text, a number or a tuple of them instead,"
        " such as its id. The types that can be a key are listed in docs/reference/groupings.md."
    )
