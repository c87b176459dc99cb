"""When a topology doubles or halves bolts: by time-outs (Lu 2020, algorithm 2) and by rates."""

from __future__ import annotations

import pytest

from penstock.control.failure_policy import FailureCount, FailurePolicy
from penstock.control.scaling import (
    BoltLoad,
    Bounds,
    LoadSample,
    RatePolicy,
    Scale,
    SpoutLoad,
    TaskLoad,
    demands,
    reachable,
    use_with,
    uses,
)
from penstock.errors import SettingError

AT_ONCE = Bounds(most=64, cool_down=0.0)


def bolt(name, *arrived, cost=0.001, inputs=("spout",), emits=1.0, queued=0, fixed=False):
    """The tasks of a bolt in a load sample of one second. Each processes the tuples that arrive, as far as the
    second suffices."""
    tasks = []
    for count in arrived:
        done = min(count, 1.0 / cost)
        tasks.append(TaskLoad(done, done * cost, count, done * emits, queued, 1_000))
    return BoltLoad(name, inputs, tuple(tasks), fixed)


def sample(time, *bolts, emitted=None, failed=0, latency=None, **spout):
    emitted = bolts[0].arrived if emitted is None and bolts else emitted or 0
    return LoadSample(time, 1.0, (SpoutLoad("spout", emitted, failed, **spout),), bolts, latency)


def failing(policy, counts, *bolts):
    """The decisions of the policy for windows one second apart."""
    bolts = bolts or (bolt("count", 100, 100),)
    return [policy.decide(sample(float(time), *bolts, failed=count)) for time, count in enumerate(counts)]


# ---- what can be reached


@pytest.mark.parametrize(
    ("old", "expected"),
    [(1, [1, 2, 4, 8, 16]), (6, [3, 6, 12]), (5, [5, 10]), (16, [1, 2, 4, 8, 16]), (20, [5, 10])],
)
def test_doubling_and_halving_reach_these(old, expected):
    assert reachable(old, Bounds(most=16)) == expected


def test_the_least_counts_too():
    assert reachable(8, Bounds(least=3, most=16)) == [4, 8, 16]
    with pytest.raises(ValueError, match="at least one task, not 0"):
        reachable(0, Bounds())


# ---- by time-outs


def test_mean_and_dispersion_follow_the_formulas():
    policy = FailurePolicy(samples=4, threshold=1e9)
    failing(policy, [7, 4, 0, 8, 20])  # the 7 has left the ring
    assert [window.failed for window in policy.recent] == [4, 0, 8, 20]
    assert policy.weights == [1.0, 0.75, 0.5, 0.25]
    assert policy.mean == 8.0
    assert policy.dispersion == pytest.approx((0.25 * 16 + 0.5 * 64 + 0.75 * 0 + 1.0 * 144) / 4)


def test_an_empty_and_a_partial_ring():
    policy = FailurePolicy(samples=4, threshold=0.0)
    assert (policy.mean, policy.dispersion) == (0.0, 0.0)
    assert failing(policy, [1_000]) == [None], "one window alone is its own average"
    assert (policy.mean, policy.dispersion) == (1_000.0, 0.0)
    policy.decide(sample(1.0, bolt("count", 1), failed=0))
    assert policy.mean == 500.0, "of the windows there are, not of those there could be"
    assert policy.dispersion == pytest.approx((1.0 + 0.75) * 500**2 / 2)


def test_more_time_outs_than_on_average_double_all_bolts_that_are_not_fixed():
    bolts = bolt("split", 50), bolt("count", 9, 9, 9), bolt("persist", 50, fixed=True)
    found = failing(FailurePolicy(AT_ONCE), [0, 0, 30], *bolts)
    average = "30 time-outs, more than the average of 10.0 in 3 load samples, S² 183 above 25"
    assert found == [None, None, Scale({"split": 2, "count": 6}, f"{average}: split 1 -> 2, count 3 -> 6 tasks")]


def test_fewer_than_on_average_halve_what_is_even():
    bolts = bolt("split", 50, 50, 50, 50), bolt("count", 9, 9, 9), bolt("one", 9)
    found = failing(FailurePolicy(AT_ONCE), [30, 0], *bolts)
    assert found[1].parallelism == {"split": 2}
    assert "0 time-outs, fewer than the average of 15.0" in found[1].reason
    assert failing(FailurePolicy(AT_ONCE), [30, 0], bolt("count", 9, 9, 9)) == [None, None], "three stay three"


def test_little_dispersion_and_the_average_itself_change_nothing():
    assert failing(FailurePolicy(AT_ONCE), [0, 0, 0, 0, 8]) == [None] * 5
    assert failing(FailurePolicy(AT_ONCE), [500] * 10) == [None] * 10, "A: a steady failure has no S²"
    assert failing(FailurePolicy(AT_ONCE, threshold=0.0), [0, 100, 50])[2] is None


def test_bounds_stop_both_ways():
    policy = FailurePolicy(Bounds(least=2, most=3, cool_down=0.0))
    assert failing(policy, [0, 100, 0, 100, 0]) == [None] * 5


def busy(name, *arrived, queued=0):
    """Tasks that are busy for 1 s with 100 tuples."""
    return bolt(name, *arrived, cost=0.01, queued=queued)


def test_a_doubling_that_helped_is_kept():
    """Failures are below average then, and Lu 2020 would halve. Half of the tasks could not do the work."""
    policy = FailurePolicy(AT_ONCE)
    assert failing(policy, [0, 0, 0, 100], busy("count", 80, 80))[3].parallelism == {"count": 4}
    after = failing(policy, [0] * 20, busy("count", 45, 45, 45, 45))
    assert after == [None] * 20


def test_tasks_that_are_not_needed_are_returned_after_a_calm_ring():
    policy = FailurePolicy(AT_ONCE)
    found = failing(policy, [0] * 6, busy("count", 10, 10, 10, 10), bolt("full", 900, 900))
    assert found[:5] == [None] * 5
    assert found[5].parallelism == {"count": 2}
    assert found[5].reason == "no time-outs and no backlog in 6 load samples: count 4 -> 2 tasks"
    policy.restart_cool_down(0.0)
    found = failing(policy, [0] * 6, busy("count", 20, 20), bolt("full", 900, 900))
    assert [each and each.parallelism for each in found] == [None] * 5 + [{"count": 1}], "a new ring"


@pytest.mark.parametrize("failed", [[30, 0], [0] * 8], ids=["fewer time-outs", "calm"])
def test_no_bolt_is_halved_while_a_backlog_is_worked_off(failed):
    assert any(failing(FailurePolicy(AT_ONCE), failed, busy("count", 10, 10)))
    assert not any(failing(FailurePolicy(AT_ONCE), failed, busy("count", 10, 10, queued=500)))
    assert not any(failing(FailurePolicy(AT_ONCE), failed, busy("count", 60, 60))), "nor if one task is too few"


def waiting(policy, latencies, queued, *arrived):
    """The decisions for load samples without a time-out."""
    bolts = (busy("count", *arrived, queued=queued),)
    return [policy.decide(sample(float(time), *bolts, latency=each)) for time, each in enumerate(latencies)]


def test_a_longer_completion_latency_doubles_where_a_backlog_waits():
    surge = [0.01, 0.01, 0.01, 4.0]
    found = waiting(FailurePolicy(AT_ONCE), surge, 500, 90, 90)
    assert found[3].parallelism == {"count": 4}
    assert found[3].reason == (
        "tuples took 4.00 s, longer than the average of 1.01 s in 4 load samples, S² 2.74 above 0.56: "
        "count 2 -> 4 tasks"
    )
    assert waiting(FailurePolicy(AT_ONCE), surge, 0, 90, 90) == [None] * 4, "more tasks would not shorten it"
    assert waiting(FailurePolicy(AT_ONCE, late=5.0), surge, 500, 90, 90) == [None] * 4


def test_a_shorter_completion_latency_halves_what_can_do_with_half():
    falls = [4.0, 4.0, 0.01]
    assert waiting(FailurePolicy(AT_ONCE), falls, 0, 20, 20)[2].parallelism == {"count": 1}
    assert waiting(FailurePolicy(AT_ONCE), falls, 0, 60, 60) == [None] * 3
    assert waiting(FailurePolicy(AT_ONCE), falls, 500, 20, 20) == [None] * 3


def test_an_overload_that_does_not_vary_is_an_overload():
    found = waiting(FailurePolicy(AT_ONCE), [4.0] * 7, 500, 200, 200)
    assert [each and each.parallelism for each in found] == [None] * 5 + [{"count": 4}, None]
    assert found[5].reason == "a backlog in each of 6 load samples: count 2 -> 4 tasks"
    assert waiting(FailurePolicy(AT_ONCE), [4.0] * 9, 500, 30, 30) == [None] * 9, "they are not busy"


def test_a_key_that_is_all_the_work_is_not_chased_by_time_outs_either():
    policy = FailurePolicy(AT_ONCE)
    assert waiting(policy, [4.0] * 6, 500, 200)[5].parallelism == {"count": 2}
    assert waiting(policy, [4.0] * 12, 500, 200, 10) == [None] * 12


def test_latency_is_kept_beside_the_failures():
    policy = FailurePolicy()
    policy.decide(sample(0.0, bolt("count", 1), failed=3, latency=0.25))
    policy.decide(sample(1.0, bolt("count", 1, queued=500)))
    assert list(policy.recent) == [FailureCount(3, 0.25), FailureCount(0, None, backlog=True)]


# ---- by rates


def rate(samples=1, **settings):
    return RatePolicy(settings.pop("bounds", AT_ONCE), up_samples=samples, down_samples=samples, **settings)


def test_one_step_leads_to_the_parallelism_that_is_enough():
    found = rate().decide(sample(0.0, bolt("count", 3_400, cost=1 / 1_200)))
    assert found == Scale(
        {"count": 8}, "count: the busiest task can process 1,200/s, but 3,400/s arrive: 1 -> 8 tasks"
    )
    # Four tasks would be busy for 0.708 of their time.
    assert rate(target=0.71).decide(sample(0.0, bolt("count", 3_400, cost=1 / 1_200))).parallelism == {"count": 4}
    assert rate().decide(sample(0.0, bolt("count", 3_300, cost=1 / 1_200))).parallelism == {"count": 4}


def test_what_a_task_could_do_is_told_by_its_busy_time():
    """It was idle for half of the time, so it could process twice as much."""
    idle = BoltLoad("count", ("spout",), (TaskLoad(500, 0.5, 500, 500, 0, 100),))
    assert uses(idle, 500.0) == [0.5]
    assert uses(idle, 3_000.0) == [3.0]


def test_bolts_behind_a_slow_one_are_scaled_in_the_same_step():
    """Split passes on 1,000 of 4,000 tuples, so count has not received the coming load yet."""
    split = bolt("split", 4_000, emits=5.0)
    count = bolt("count", 5_000, cost=0.0001, inputs=("split",))
    seen = sample(0.0, split, count)
    assert demands(seen) == {"split": 4_000.0, "count": 20_000.0}
    assert rate().decide(seen).parallelism == {"split": 8, "count": 4}


def test_a_bolt_gets_its_share_of_what_its_inputs_emit():
    """One of two streams, copies to all tasks: the share of emitted tuples that arrives."""
    first = bolt("first", 100, emits=2.0)
    half = bolt("half", 100, inputs=("first",))
    both = bolt("both", 300, inputs=("first", "half"))
    found = demands(sample(0.0, both, half, first, emitted=100, offered=1_000))
    assert found == {"first": 1_000.0, "half": 1_000.0, "both": 3_000.0}


def test_bolts_in_a_cycle_are_refused():
    with pytest.raises(ValueError, match=r"form a cycle: \['a', 'b'\]"):
        demands(sample(0.0, bolt("a", 1, inputs=("b",)), bolt("b", 1, inputs=("a",))))


def test_the_busiest_task_counts_not_the_average():
    even, skewed = bolt("count", 500, 500, 500, 500), bolt("count", 1_700, 100, 100, 100)
    assert rate().decide(sample(0.0, even)) is None
    assert rate().decide(sample(0.0, skewed)).parallelism == {"count": 16}


def test_one_busy_task_among_idle_ones_may_be_chance():
    """It takes as many samples as scaling down, and always the same task."""
    policy = RatePolicy(AT_ONCE, up_samples=2, down_samples=4)
    for time in range(7):
        assert policy.decide(sample(float(time), bolt("count", *([900, 300] if time % 2 else [300, 900])))) is None
    found = [policy.decide(sample(7.0 + time, bolt("count", 900, 300))) for time in range(4)]
    assert [bool(each) for each in found] == [False, False, False, True]


def test_a_halving_adds_up_the_tasks_that_are_merged():
    assert use_with([0.4, 0.1, 0.1, 0.3], 2) == pytest.approx(0.5)  # 0 with 2, 1 with 3
    assert use_with([0.4, 0.1, 0.1, 0.3], 1) == pytest.approx(0.9)
    assert use_with([0.4, 0.1, 0.1, 0.3], 8) == pytest.approx(0.2)
    found = rate().decide(sample(0.0, bolt("count", 400, 100, 100, 300)))
    assert found == Scale(
        {"count": 2}, "count: the busiest task can process 1,000/s, and only 400/s arrive: 4 -> 2 tasks"
    )


def test_two_hot_tasks_that_would_be_merged_stay_apart():
    assert rate().decide(sample(0.0, bolt("count", 500, 0, 500, 0))) is None
    assert rate().decide(sample(0.0, bolt("count", 250, 250, 0, 0))).parallelism == {"count": 1}


def test_nothing_arrives():
    idle = BoltLoad("count", ("spout",), (TaskLoad(0, 0.0, 0, 0),) * 4)
    assert rate().decide(sample(0.0, idle)) == Scale({"count": 1}, "count: no tuples arrive: 4 -> 1 tasks")


def test_a_bolt_that_has_not_processed_anything_yet_is_left_alone():
    stuck = BoltLoad("count", ("spout",), (TaskLoad(0, 0.0, 900, 0, 900, 1_000),))
    assert rate().decide(sample(0.0, stuck)) is None


def test_a_task_without_tuples_costs_what_the_others_do():
    assert uses(bolt("count", 500, 0), 1_000.0) == [1.0, 0.0]
    late = BoltLoad("count", ("spout",), (TaskLoad(100, 0.2, 100, 0), TaskLoad(0, 0.0, 100, 0)))
    assert uses(late, 200.0) == pytest.approx([0.2, 0.2])


@pytest.mark.parametrize(
    "more",
    [{"queued": 101}, {"held_back": 0.06}, {"emitted": 400, "offered": 350}],
    ids=lambda more: next(iter(more)),
)
def test_nothing_shrinks_while_a_backlog_is_worked_off(more):
    queued = more.get("queued", 0)
    spout = {name: value for name, value in more.items() if name != "queued"}
    calm, busy = sample(0.0, bolt("count", 100, 100)), sample(0.0, bolt("count", 100, 100, queued=queued), **spout)
    assert rate().decide(calm).parallelism == {"count": 1}
    assert rate().decide(busy) is None
    policy = RatePolicy(AT_ONCE, down_samples=2)
    assert [policy.decide(each) for each in (calm, busy, calm)] == [None] * 3, (
        "the load samples in a row begin anew"
    )
    assert policy.decide(calm)


def test_a_spout_that_is_held_back_would_emit_more():
    assert SpoutLoad("spout", 600, held_back=0.25).demand == 800
    assert SpoutLoad("spout", 600, held_back=0.99).demand == 1_200, "how much more it does not say"
    assert SpoutLoad("spout", 600, held_back=0.99, offered=5_000).demand == 5_000
    assert SpoutLoad("spout", 600, offered=400).demand == 400, "it catches up"
    held = sample(0.0, bolt("count", 600), held_back=0.5)
    assert rate().decide(held).parallelism == {"count": 2}
    assert rate().decide(sample(0.0, bolt("count", 600))) is None


def test_between_the_thresholds_nothing_moves():
    for arrived in (570, 700, 830):  # as one task; two tasks have half of it each
        assert rate().decide(sample(0.0, bolt("count", arrived))) is None
        assert rate().decide(sample(0.0, bolt("count", arrived / 2, arrived / 2))) is None
    assert rate().decide(sample(0.0, bolt("count", 850))).parallelism == {"count": 2}
    assert rate().decide(sample(0.0, bolt("count", 275, 275))).parallelism == {"count": 1}


def test_a_load_has_to_last_a_few_load_samples():
    policy = RatePolicy(AT_ONCE, up_samples=2, down_samples=3)
    calm, high, low = bolt("count", 350, 350), bolt("count", 900, 900), bolt("count", 100, 100)
    samples = [high, calm, high, high, low, low, high, low, low, low]
    found = [policy.decide(sample(float(time), each)) for time, each in enumerate(samples)]
    assert [time for time, each in enumerate(found) if each] == [3, 9]


def test_who_wants_more_goes_along_with_who_has_waited():
    policy = RatePolicy(AT_ONCE, up_samples=2)
    early, both = bolt("a", 900), bolt("b", 900, inputs=("a",))
    policy.decide(sample(0.0, early, bolt("b", 500, inputs=("a",))))
    assert policy.decide(sample(1.0, early, both)).parallelism == {"a": 2, "b": 2}


def test_fixed_bolts_and_bounds():
    assert rate().decide(sample(0.0, bolt("count", 9_000, fixed=True))) is None
    assert rate(bounds=Bounds(most=6, cool_down=0.0)).decide(sample(0.0, bolt("a", 9_000))).parallelism == {"a": 4}
    assert rate(bounds=Bounds(most=6, cool_down=0.0)).decide(sample(0.0, bolt("a", *[9_000] * 4))) is None
    assert rate(bounds=Bounds(least=2, cool_down=0.0)).decide(sample(0.0, bolt("a", 1, 1, 1, 1))).parallelism == {
        "a": 2
    }


def test_a_key_that_is_all_the_work_is_not_chased():
    policy = rate()
    assert policy.decide(sample(0.0, bolt("count", 900, 900))).parallelism == {"count": 4}
    assert policy.decide(sample(1.0, bolt("count", 1_790, 3, 3, 4))) is None, "its share of the work rose"
    assert policy.decide(sample(2.0, bolt("count", 900, 900, 900, 900))), "that is another load"


def test_the_cool_down_counts_from_the_decision_and_anew_from_the_replacement():
    policy = rate(bounds=Bounds(cool_down=10.0))
    high = bolt("count", 900)
    assert policy.decide(sample(0.0, high))
    assert policy.decide(sample(9.0, high)) is None
    policy.restart_cool_down(9.5)  # the replacement took some time
    assert policy.decide(sample(19.0, high)) is None
    assert policy.decide(sample(19.5, high))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bounds(least=0), "scaling: the minimum parallelism must be at least 1, not 0."),
        (
            lambda: Bounds(least=4, most=3),
            "scaling: the maximum parallelism must be at least the minimum, 4, not 3.",
        ),
        (lambda: Bounds(cool_down=-1.0), "scaling: the cool-down must be 0 s or more, not -1.0."),
        (lambda: FailurePolicy(samples=1), "scaling: the number of load samples must be at least 2, not 1."),
        (lambda: FailurePolicy(threshold=-1.0), "scaling: the threshold C must be 0 or more, not -1.0."),
        (
            lambda: FailurePolicy(late=0.0),
            "scaling: the threshold of the latency must be greater than 0, not 0.0.",
        ),
        (lambda: RatePolicy(target=1.0), "scaling: the target use must be between 0 and 1, not 1.0."),
        (lambda: RatePolicy(slack=0.0), "scaling: the slack must be between 0 and 1, not 0.0."),
        (lambda: RatePolicy(target=0.9), "scaling: the target use with its slack must be below 1, not 1.08."),
        (lambda: RatePolicy(up_samples=0), "scaling: the number of load samples must be at least 1, not 0."),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(SettingError) as caught:
        make()
    assert str(caught.value).startswith(message)
