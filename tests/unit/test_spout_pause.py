"""Pauses of spouts that have nothing to emit."""

import pytest

from penstock.control.spout_pause import SpoutPause


def test_a_short_rest_does_not_lengthen_the_pauses():
    pause = SpoutPause(0.001)
    for _ in range(50):
        pause.note(emitted=False)
    assert pause.seconds == 0.001


def test_a_long_rest_does_up_to_ten_times():
    pause = SpoutPause(0.001)
    seconds = 0.0
    pauses = []
    while seconds < 1.0:
        pause.note(emitted=False)
        pauses.append(pause.seconds)
        seconds += pause.seconds
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(0.010)
    assert len(pauses) < 200, "instead of a thousand"


def test_the_first_tuple_ends_it():
    pause = SpoutPause(0.001)
    for _ in range(500):
        pause.note(emitted=False)
    pause.note(emitted=True)
    assert pause.seconds == 0.001
