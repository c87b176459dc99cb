"""The ledger of arrivals: in whatever order partials arrive, everything before its end has arrived."""

import random

from hypothesis import given
from hypothesis import strategies as st

from penstock.control.segments import ArrivalLedger, SourceRange, first_position

SOURCE = (1, "default")


@st.composite
def sent(draw):
    """Ranges of the source data, each cut into the shares that tasks got, and the order in which they arrive."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    shares, position = [], first_position(draw(st.integers(0, 3)))
    for length in lengths:
        left = length
        while left:
            tuples = draw(st.integers(1, left))
            shares.append((SourceRange(position, length), tuples))
            left -= tuples
        position += length
    return shares, draw(st.randoms(use_true_random=False))


@given(sent())
def test_the_end_is_where_the_first_missing_tuple_is(script):
    shares, draw = script
    first = shares[0][0].offset
    ledger = ArrivalLedger(first >> 40)
    missing = {data: data.length for data, _ in shares}
    order = list(shares)
    draw.shuffle(order)
    clock = None
    for data, tuples in order:
        newest = ledger.arrived(SOURCE, data, tuples, float(data.offset))
        ledger.validate()
        missing[data] -= tuples
        gap = min((each.offset for each, left in missing.items() if left), default=sum(shares[-1][0]))
        assert ledger.end(SOURCE) == gap
        before = [each.offset for each in missing if each.offset < gap]
        clock = newest if newest is not None else clock
        assert clock == (float(max(before)) if before else None), "the time of what is complete, and of no more"
        moved = ArrivalLedger(first >> 40)
        moved.restore(ledger.to_state())
        assert (moved.end(SOURCE), moved.gaps) == (ledger.end(SOURCE), ledger.gaps)
    assert ledger.gaps == 0


def test_tuples_that_failed_have_no_time_and_make_no_gap():
    ledger = ArrivalLedger(0)
    assert ledger.arrived(SOURCE, SourceRange(0, 4), 4, None) is None
    assert ledger.arrived(SOURCE, SourceRange(4, 2), 2, 7.5) == 7.5


def test_what_an_earlier_generation_sent_is_ignored():
    ledger = ArrivalLedger(2)
    assert ledger.arrived(SOURCE, SourceRange(first_position(1) + 10, 5), 5, 9.0) is None
    assert ledger.gaps == 0
    assert ledger.arrived(SOURCE, SourceRange(first_position(2), 5), 5, 1.0) == 1.0


def test_a_gap_that_is_never_filled_is_given_up():
    ledger = ArrivalLedger(0)
    for n in range(1, 100_001):
        assert ledger.arrived(SOURCE, SourceRange(n, 1), 1, float(n)) is None
    assert ledger.arrived(SOURCE, SourceRange(100_001, 1), 1, 0.5) == 100_000.0
    assert ledger.gaps == 0


def test_each_sender_has_its_own_data():
    ledger, draw = ArrivalLedger(0), random.Random(0)
    for n in range(20):
        task = draw.randrange(3)
        ledger.arrived((task, "default"), SourceRange(ledger.end((task, "default")), 3), 3, float(n))
    assert sum(ledger.end((task, "default")) for task in range(3)) == 60
