"""The runner of steps: what is done, undone and reported when a step fails, takes too long, or is not wanted any
more."""

import pytest

from penstock.driver.steps import Cause, Ending, Problem, Step, StepRunner
from penstock.errors import PenstockError, StateError, TopologyFailed
from tests.unit.simulated import SimulatedWaiter


class Chores:
    """A change of three steps, which writes down what is done and undone."""

    kind, number = "chores", 7

    def __init__(self, **middle):
        self.waiter = SimulatedWaiter()
        self.log = []
        self.middle = {"do": lambda: self.log.append("do b"), **middle}

    def steps(self):
        return [
            Step("a", lambda: self.log.append("do a"), undo=lambda: self.log.append("undo a")),
            Step("b", undo=lambda: self.log.append("undo b"), **self.middle),
            Step("c", lambda: self.log.append("do c"), undo=lambda: self.log.append("undo c")),
        ]

    def run(self, **runner):
        return StepRunner(self.waiter, **runner).run(self)


class Sick:
    """A watch that finds something from a certain time on."""

    def __init__(self, waiter, at, alarms=True):
        self._waiter, self._at, self._alarms = waiter, at, alarms
        self.problem = Problem(Cause.LOST, TopologyFailed("worker 1.0", "it is gone"))

    def alarm(self):
        return self._alarms and self._waiter.now() >= self._at

    def check(self):
        return self.problem if self._waiter.now() >= self._at else None


def fails(error):
    def do():
        raise error

    return do


def test_all_steps_are_done_in_order_and_timed():
    chores = Chores()
    chores.middle["until"] = lambda: chores.waiter.now() >= 3.0
    ended = chores.run()
    assert (ended.ending, ended.done, ended.problem) == (Ending.DONE, True, None)
    assert chores.log == ["do a", "do b", "do c"]
    assert list(ended.times) == ["a", "b", "c"]
    assert ended.times["a"] == 0.0
    assert ended.times["b"] == pytest.approx(3.0, abs=0.2)


def test_a_step_that_raises_is_undone_with_all_before_it():
    error = StateError("store", "it does not answer")
    chores = Chores(do=fails(error))
    ended = chores.run()
    assert (ended.ending, ended.step) == (Ending.UNDONE, "b")
    assert ended.problem == Problem(Cause.FAILED, error)
    assert chores.log == ["do a", "undo b", "undo a"]
    assert list(ended.times) == ["a"]


def test_what_is_no_error_of_ours_is_internal():
    ended = Chores(do=fails(KeyError("gateway"))).run(explain=lambda error: PenstockError("Spark", repr(error)))
    assert ended.problem.cause is Cause.INTERNAL
    assert str(ended.problem).startswith("Spark: KeyError('gateway')")


def test_a_step_that_takes_too_long():
    chores = Chores(
        until=lambda: False, limit=5.0, expected="not all workers connected", progress=lambda: "1 of 2"
    )
    ended = chores.run(where="topology 'words'")
    assert ended.problem.cause is Cause.TIMED_OUT
    assert str(ended.problem).startswith("topology 'words': not all workers connected within 5 s; 1 of 2")
    assert chores.waiter.now() == pytest.approx(5.0)
    assert chores.log == ["do a", "do b", "undo b", "undo a"]


def test_nothing_is_undone_behind_the_point_of_no_return():
    chores = Chores(do=fails(StateError("store", "it is gone")), point_of_no_return=True)
    ended = chores.run()
    assert (ended.ending, ended.step) == (Ending.BROKEN, "b")
    assert chores.log == ["do a"]


@pytest.mark.parametrize("alarms", [True, False])
def test_what_is_watched_ends_the_wait(alarms):
    chores = Chores(until=lambda: False)
    sick = Sick(chores.waiter, 1.0, alarms)
    chores.middle["watch"] = (sick,)
    ended = chores.run()
    assert ended.problem == sick.problem
    assert chores.waiter.now() == pytest.approx(1.0, abs=0.2)


def test_an_alarm_counts_also_when_the_step_has_ended():
    chores = Chores(until=lambda: True)
    chores.middle["watch"] = (Sick(chores.waiter, 0.0),)
    assert chores.run().problem.cause is Cause.LOST


@pytest.mark.parametrize("poll", [True, False])
def test_a_wait_is_cancelled(poll):
    chores = Chores(until=lambda: False, poll=poll)
    ended = chores.run(cancelled=lambda: chores.waiter.now() >= 2.0)
    assert (ended.ending, ended.problem.cause) == (Ending.UNDONE, Cause.CANCELLED)
    assert chores.waiter.now() == pytest.approx(2.0, abs=0.2)
    assert chores.log == ["do a", "do b", "undo b", "undo a"]


def test_a_cancelled_change_does_not_begin():
    chores = Chores()
    assert chores.run(cancelled=lambda: True).step == "a"
    assert chores.log == ["undo a"]


def test_a_step_that_may_not_be_cancelled_ends():
    chores = Chores(cancellable=False)
    chores.middle["until"] = lambda: chores.waiter.now() >= 3.0
    ended = chores.run(cancelled=lambda: chores.waiter.now() >= 1.0)
    assert ended.step == "c"
    assert chores.waiter.now() == pytest.approx(3.0, abs=0.2)


def test_a_problem_may_be_put_up_with_or_told_in_other_words():
    chores = Chores(until=lambda: False, limit=1.0, on_problem=lambda problem: None)
    assert chores.run().done
    other = Problem(Cause.FAILED, StateError("store", "no room"))
    assert Chores(do=fails(KeyError()), on_problem=lambda problem: other).run().problem is other


def test_an_undo_that_fails_does_not_keep_others_from_being_undone():
    chores = Chores(do=fails(StateError("store", "it is gone")))
    chores.steps = lambda steps=chores.steps: [*steps()[:1], Step("x", undo=fails(OSError("gone"))), steps()[1]]
    chores.run()
    assert chores.log == ["do a", "undo b", "undo a"]


def test_an_interrupt_undoes_and_goes_on():
    chores = Chores(do=fails(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        chores.run()
    assert chores.log == ["do a", "undo b", "undo a"]


def test_an_interrupt_during_an_undo_is_raised_when_all_steps_are_undone():
    chores = Chores(do=fails(StateError("store", "it is gone")))
    interrupted = Step("x", undo=fails(KeyboardInterrupt()))
    chores.steps = lambda steps=chores.steps: [steps()[0], interrupted, steps()[1]]
    with pytest.raises(KeyboardInterrupt):
        chores.run()
    assert chores.log == ["do a", "undo b", "undo a"]


def test_crash_points_are_told_each_step_and_nothing_is_undone_behind_a_crash():
    class Died(BaseException):
        pass

    told = []

    def crash(change, step):
        told.append((step, change.number))
        if step == "b":
            raise Died

    chores = Chores()
    with pytest.raises(Died):
        chores.run(crash=crash)
    assert told == [("a", 7), ("b", 7)]
    assert chores.log == ["do a", "do b"]


def test_a_slow_condition_is_polled_from_time_to_time():
    chores, asked = Chores(poll=True), []
    chores.middle["until"] = lambda: asked.append(chores.waiter.now()) or len(asked) == 4
    assert chores.run().done
    assert asked == pytest.approx([0.0, 0.2, 0.4, 0.6])


def test_a_change_that_is_cancelled_just_before_the_point_of_no_return_is_undone():
    chores = Chores(point_of_no_return=True)
    ended = chores.run(cancelled=lambda: "do a" in chores.log)
    assert (ended.ending, ended.problem.cause) == (Ending.UNDONE, Cause.CANCELLED)
    assert chores.log == ["do a", "undo b", "undo a"]
