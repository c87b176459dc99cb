"""When waiting tuples are sent: at once after a pause, spaced while frames follow each other."""

import math

import pytest

from penstock import Settings
from penstock.worker.outgoing import Linger

SPACING, BUSY = 0.001, 0.02
"""The defaults of ``transport.linger`` and ``transport.busy_linger``."""


def linger(targets=1):
    assert (Settings().transport.linger, Settings().transport.busy_linger) == (SPACING, BUSY)
    return Linger(Settings(), targets)


def test_a_tuple_that_follows_a_pause_is_sent_at_once():
    found = linger()
    assert found.is_due(10.0, idle=True, emits=True)
    found.sent(10.0)
    assert not found.is_due(10.0 + SPACING / 2, idle=True, emits=True)
    assert found.is_due(10.0 + 1.1 * SPACING, idle=True, emits=True)


def test_a_bolt_without_further_input_sends_at_once():
    found = linger()
    found.sent(10.0)
    assert found.is_due(10.00001, idle=True, emits=False)


def test_more_targets_need_more_spacing_up_to_that_of_a_busy_worker():
    found = linger(targets=100)
    found.sent(10.0)
    assert not found.is_due(10.0 + BUSY * 0.9, idle=True, emits=True)
    assert found.is_due(10.0 + BUSY * 1.1, idle=True, emits=True)


def test_a_busy_worker_fills_frames_but_nothing_waits_for_ever():
    found = linger()
    found.note(10.0, waits=True)
    assert not found.is_due(10.0 + 0.9 * BUSY, idle=False, emits=True)
    assert found.is_due(10.0 + 1.1 * BUSY, idle=False, emits=True)


def test_the_wait_ends_when_it_is_due():
    found = linger()
    assert found.wait(10.0, emits=True) == math.inf
    found.sent(10.0)
    found.note(10.0002, waits=True)
    assert found.wait(10.0002, emits=True) == pytest.approx(SPACING - 0.0002)
    found.note(10.003, waits=False)
    assert not found.waiting
