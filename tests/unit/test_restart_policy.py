"""How soon a lost topology is started again, and what counts against it."""

from penstock.driver.restart_policy import RestartPolicy


def test_the_pause_grows_with_starts_in_vain_up_to_a_limit():
    restarts, pauses = RestartPolicy(), []
    for _ in range(9):
        restarts.lost(0.2)
        pauses.append(restarts.pause)
        restarts.begin()
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert (restarts.count, restarts.tries) == (9, 9)


def test_a_start_that_worked_is_followed_at_once_but_counts():
    restarts = RestartPolicy()
    for _ in range(3):
        restarts.lost(-1.0)
        restarts.begin()
    restarts.lost(2.0)
    assert (restarts.pause, restarts.tries) == (0.0, 3)


def test_after_ten_minutes_nothing_counts_against_it():
    restarts = RestartPolicy()
    restarts.begin()
    restarts.lost(601.0)
    assert (restarts.tries, restarts.count) == (0, 1)
