"""Acks inside one worker: flights complete when nothing that stems from them is left, and a failed tuple names
exactly its messages."""

import numpy as np
import pytest

from penstock.acking.flights import EmittedRows, Flight, FlightLog, MadeRows, joined


def emitted(log, first, count, size=4):
    flights = [(Flight(log, 1, at, min(size, first + count - at)), min(at + size, first + count))
               for at in range(first, first + count, size)]  # fmt: skip
    return EmittedRows(range(first, first + count), flights)


def failed(log):
    return [(message.task, message.number) for message in log.take()[0]]


def test_a_flight_is_complete_when_its_last_parcel_is_done():
    log = FlightLog()
    rows = emitted(log, 10, 4)
    rows.hold()  # they wait
    for _ in range(3):
        rows.hold()  # three parcels
    rows.release()
    for _ in range(2):
        rows.release()
        assert not log.complete
    rows.release()
    (flight,) = log.take()[1]
    assert flight.numbers().tolist() == [10, 11, 12, 13]
    assert log.take() == ([], [])


def test_a_flight_cannot_be_released_more_often_than_held():
    rows = emitted(FlightLog(), 0, 1)
    with pytest.raises(AssertionError, match="released more often"):
        rows.release()


def test_a_failed_message_is_not_complete_and_fails_once():
    log = FlightLog()
    rows = emitted(log, 0, 3)
    rows.hold()
    rows.fail_row(1, "bolt", "no")
    rows.fail_row(1, "bolt", "again")
    rows.release()
    ((message,), (flight,)) = log.take()
    assert (message.number, message.component, message.error) == (1, "bolt", "no")
    assert flight.numbers().tolist() == [0, 2]


def test_what_was_dropped_is_never_acked():
    log = FlightLog()
    rows = emitted(log, 0, 3)
    rows.hold()
    rows.lose()
    rows.release()
    assert log.take() == ([], [])


def test_a_row_is_traced_back_through_bolts_and_routing():
    """Messages 0 to 5 in flights of four; a bolt emits two rows for each; every third goes to another task, which
    emits one row for each."""
    log = FlightLog()
    first = emitted(log, 0, 6)
    made = MadeRows(first, 0, [2, 4, 6, 8, 10, 12], 0, 12)
    chosen = made.take(np.array([0, 3, 6, 9]))
    last = MadeRows(chosen, 0, [11, 12, 13, 14], 10, 4)
    assert len(last.flights) == 2
    last.fail_row(3, "bolt", "no")
    assert failed(log) == [(1, 4)]
    last.take(slice(1, 3)).fail_row(0, "bolt", "no")
    assert failed(log) == [(1, 1)]


def test_rows_of_a_batch_stem_from_the_whole_batch():
    log = FlightLog()
    made = MadeRows(emitted(log, 0, 3), 3, None, 0, 7)
    made.fail_row(6, "bolt", "no")
    assert sorted(failed(log)) == [(1, 0), (1, 1), (1, 2)]


def test_untracked_rows_have_no_messages():
    log = FlightLog()
    flight = Flight(log, 1, 5, 2)
    rows = EmittedRows([None, 5, None, 6], [(flight, 7)])
    assert not rows.tracked
    rows.fail_row(0, "bolt", "no")
    rows.fail_row(3, "bolt", "no")
    assert failed(log) == [(1, 6)]
    whole = joined([(None, 2), (rows, 4)])
    assert not whole.tracked
    whole.fail_row(1, "bolt", "no")
    whole.fail_row(3, "bolt", "no")
    assert failed(log) == [(1, 5)]
    assert joined([(None, 3)]) is None
