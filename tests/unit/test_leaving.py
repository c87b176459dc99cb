"""When tuples leave a worker, and when a worker leaves."""

import math

import pytest

from penstock import Settings, Transport
from penstock.worker.departure import Departure
from penstock.worker.outgoing import Linger

SETTINGS = Settings(transport=Transport(0.002, busy_linger=0.010))


def test_a_bolt_with_nothing_to_do_sends_at_once():
    assert Linger(SETTINGS, targets=1).is_due(0.0, idle=True, emits=False)


def test_a_tuple_of_a_spout_that_follows_a_pause_leaves_at_once():
    linger = Linger(SETTINGS, targets=1)
    linger.sent(1.0)
    assert linger.is_due(1.0021, idle=True, emits=True)


def test_a_spout_waits_for_company_as_long_as_the_linger_says():
    linger = Linger(SETTINGS, targets=1)
    linger.sent(1.0)
    linger.note(1.0, waits=True)
    linger.note(1.001, waits=True)  # the oldest counts
    assert not linger.is_due(1.0015, idle=True, emits=True)
    assert linger.wait(1.0015, emits=True) == pytest.approx(0.0005)
    assert linger.is_due(1.0021, idle=True, emits=True)


def test_a_busy_worker_waits_longer():
    linger = Linger(SETTINGS, targets=1)
    linger.note(1.0, waits=True)
    assert not linger.is_due(1.009, idle=False, emits=False)
    assert linger.is_due(1.0101, idle=False, emits=False)


def test_who_sends_to_many_does_not_send_all_the_time():
    linger = Linger(SETTINGS, targets=4)
    linger.sent(1.0)
    linger.note(1.001, waits=True)
    assert not linger.is_due(1.005, idle=True, emits=False)
    assert linger.wait(1.005, emits=False) == pytest.approx(0.001)
    assert linger.is_due(1.0061, idle=True, emits=False)
    assert Linger(SETTINGS, targets=1000).is_due(1.0, idle=True, emits=False), "the first time at once"


def test_there_is_no_linger_longer_than_the_busy_one():
    linger = Linger(SETTINGS, targets=1000)
    linger.sent(1.0)
    linger.note(1.0, waits=True)
    assert linger.wait(1.0, emits=True) == pytest.approx(0.010)


def test_where_nothing_waits_nothing_is_due():
    linger = Linger(SETTINGS, targets=1)
    linger.note(1.0, waits=True)
    linger.note(1.1, waits=False)
    assert not linger.waiting
    assert linger.wait(1.2, emits=True) == math.inf
    assert not linger.is_due(9.0, idle=False, emits=False)


def test_a_worker_leaves_at_the_end_of_the_epoch_it_was_told():
    departure = Departure()
    assert (departure.requested, departure.last_epoch, departure.commit_at(7)) == (False, math.inf, None)
    departure.request(commit=3, epoch=7)
    assert (departure.requested, departure.last_epoch) == (True, 7)
    assert (departure.commit_at(6), departure.commit_at(7)) == (None, 3)
    assert not departure.left
    departure.finish()
    assert (departure.left, departure.requested, departure.last_epoch) == (True, False, math.inf)


def test_the_snapshot_for_its_commit_is_made_when_it_leaves_and_no_second_time():
    departure = Departure()
    assert not departure.postpones(3)
    departure.request(commit=3, epoch=7)
    assert not departure.postpones(2)
    assert departure.postpones(3)
    departure.finish()
    assert departure.postpones(3), "told late: it has been made"
    assert not departure.postpones(4)
    assert departure.cancel() is None


def test_who_stays_after_all_makes_the_snapshot_that_was_put_off():
    departure = Departure()
    departure.request(commit=3, epoch=7)
    assert departure.cancel() is None, "nobody has asked for a snapshot yet"
    departure.request(commit=3, epoch=7)
    assert departure.postpones(3)
    assert departure.cancel() == 3
    assert not departure.postpones(3), "it is made at once now"
    assert (departure.left, departure.requested) == (False, False)
