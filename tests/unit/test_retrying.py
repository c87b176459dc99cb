"""A state store that does not answer is asked again, with growing pauses and a word about it."""

import pytest

from penstock.driver.retrying import retried
from penstock.errors import StateError, StateUnavailable


class Away:
    """Answers after so many attempts."""

    def __init__(self, times, error=StateUnavailable):
        self.left, self._error = times, error

    def __call__(self):
        self.left -= 1
        if self.left >= 0:
            raise self._error("store", "it does not answer (503)")
        return "here"


def test_it_is_asked_again_with_growing_pauses():
    pauses, said = [], []
    assert retried(Away(6), 60.0, lambda seconds: bool(pauses.append(seconds)), said.append) == "here"
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0]
    assert (
        said[1] == "the state store does not answer (store: it does not answer (503)); Penstock tries again in 1 s"
    )


def test_patience_ends():
    pauses = []
    with pytest.raises(StateUnavailable):
        retried(Away(100), 3.0, lambda seconds: bool(pauses.append(seconds)))
    assert sum(pauses) == 3.5


def test_who_is_told_to_stop_does_not_go_on():
    away = Away(100)
    with pytest.raises(StateUnavailable):
        retried(away, 60.0, lambda seconds: True)
    assert away.left == 99


def test_an_error_that_lasts_is_raised_at_once():
    away = Away(100, StateError)
    with pytest.raises(StateError):
        retried(away, 60.0, lambda seconds: False)
    assert away.left == 99
