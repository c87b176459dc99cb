"""The life of a topology as a state machine: which decision follows which event, in every phase."""

import pytest

from penstock.driver import lifecycle
from penstock.driver.lifecycle import (
    OVER,
    RUNNING,
    TRANSITIONS,
    CarryOut,
    ChangeEnded,
    ChangeRequested,
    KillRequested,
    Refuse,
    RestartEnded,
    RestartQuery,
    RunFailed,
    SetSpouts,
    ShutDown,
    ShutDownEnded,
    SpoutsRequested,
    StartAgain,
    StartEnded,
    TopologyLifecycle,
    TopologyPhase,
)
from penstock.driver.steps import Cause, Problem
from penstock.errors import StateError, StateUnavailable, TopologyFailed

REQUEST = object()


def problem(cause=Cause.LOST, error=None):
    return Problem(cause, error or TopologyFailed("topology 'words'", "a worker is gone"))


@pytest.fixture
def life():
    made = TopologyLifecycle("words", max_restarts=3)
    made.handle(StartEnded(None))
    yield made
    made.validate()


def in_phase(phase):
    """A machine in a phase, by the shortest way there."""
    made = TopologyLifecycle("words", max_restarts=3)
    ways = {
        TopologyPhase.STARTING: [],
        TopologyPhase.ACTIVE: [StartEnded(None)],
        TopologyPhase.INACTIVE: [StartEnded(None), SpoutsRequested(False)],
        TopologyPhase.CHANGING: [StartEnded(None), ChangeRequested(REQUEST)],
        TopologyPhase.RESTARTING: [StartEnded(None), RunFailed(problem(), 5.0)],
        TopologyPhase.ENDING: [StartEnded(None), KillRequested(True)],
        TopologyPhase.ENDED: [StartEnded(None), KillRequested(True), ShutDownEnded(None)],
        TopologyPhase.FAILED: [StartEnded(problem(Cause.FAILED)), ShutDownEnded(None)],
    }
    for event in ways[phase]:
        made.handle(event)
    assert made.phase is phase
    return made


def test_every_phase_has_its_transitions_and_the_last_ones_none():
    assert set(TRANSITIONS) == set(TopologyPhase)
    assert all(not TRANSITIONS[phase] for phase in OVER)
    assert all(
        TopologyPhase.ENDING in TRANSITIONS[phase] for phase in set(TopologyPhase) - OVER - {TopologyPhase.ENDING}
    )


def test_a_start_that_works():
    made = TopologyLifecycle("words", 3)
    assert made.state == "starting"
    assert made.handle(StartEnded(None)) is None
    assert (made.phase, made.state) == (TopologyPhase.ACTIVE, "active")


def test_a_start_that_fails_ends_the_topology():
    made, failed = TopologyLifecycle("words", 3), problem(Cause.LOST)
    assert made.handle(StartEnded(failed)) == ShutDown(drain=False, running=False, error=failed.error)
    made.handle(ShutDownEnded(None))
    assert (made.state, made.error) == ("failed", failed.error)
    made.validate()


def test_a_start_falls_back_where_a_snapshot_cannot_be_read():
    made = TopologyLifecycle("words", 3)
    assert made.handle(StartEnded(problem(Cause.UNREADABLE))) == StartAgain()
    assert (made.phase, made.restarts.count) == (TopologyPhase.STARTING, 1)


def test_spouts_pause_and_go_on(life):
    assert life.handle(SpoutsRequested(False)) == SetSpouts(False)
    assert life.state == "inactive"
    assert life.handle(SpoutsRequested(True)) == SetSpouts(True)
    assert life.state == "active"


@pytest.mark.parametrize("phase", sorted(set(TopologyPhase) - RUNNING - {TopologyPhase.STARTING}, key=str))
@pytest.mark.parametrize("event", [SpoutsRequested(True), ChangeRequested(REQUEST)])
def test_requests_are_refused_where_it_does_not_run(phase, event):
    made = in_phase(phase)
    refused = made.handle(event)
    assert isinstance(refused, Refuse)
    assert made.state in str(refused.error)
    assert made.phase is phase


def test_a_change_is_carried_out_and_spouts_stay_as_they_were(life):
    life.handle(SpoutsRequested(False))
    assert life.handle(ChangeRequested(REQUEST)) == CarryOut(REQUEST)
    assert (life.phase, life.state) == (TopologyPhase.CHANGING, "inactive")
    assert life.handle(ChangeEnded(None)) is None
    assert life.phase is TopologyPhase.INACTIVE


def test_a_change_that_breaks_is_followed_by_a_restart(life):
    life.handle(ChangeRequested(REQUEST))
    lost = problem()
    assert life.handle(ChangeEnded(lost, 20.0)) == RestartQuery(lost, 0.0)
    assert life.state == "restarting"


def test_a_change_that_was_cancelled_waits_for_the_end(life):
    life.handle(ChangeRequested(REQUEST))
    assert life.handle(ChangeEnded(problem(Cause.CANCELLED), 20.0)) is None
    assert life.handle(KillRequested(True)) == ShutDown(drain=True, running=True, error=None)


@pytest.mark.parametrize(
    "passing",
    [problem(), problem(Cause.UNREADABLE), problem(Cause.FAILED, StateUnavailable("store", "it is silent"))],
)
def test_a_loss_is_followed_by_a_restart(life, passing):
    assert life.handle(RunFailed(passing, 5.0)) == RestartQuery(passing, 0.0)
    assert life.handle(RestartEnded(None)) is None
    assert (life.state, life.restarts.count) == ("active", 1)


@pytest.mark.parametrize("cause", [Cause.FAILED, Cause.INTERNAL])
def test_an_error_of_its_own_ends_it(life, cause):
    failed = problem(cause)
    assert life.handle(RunFailed(failed, 5.0)) == ShutDown(drain=False, running=False, error=failed.error)
    life.handle(ShutDownEnded(None))
    assert (life.state, life.error) == ("failed", failed.error)


@pytest.mark.parametrize("phase", [TopologyPhase.CHANGING, TopologyPhase.RESTARTING])
def test_an_engine_that_dies_ends_it_in_any_phase(phase):
    made, died = in_phase(phase), problem(Cause.INTERNAL)
    assert made.handle(RunFailed(problem(), 1.0)) is None, "who is at work finds that"
    assert made.handle(RunFailed(died, 1.0)) == ShutDown(drain=False, running=False, error=died.error)


def test_it_restarts_with_growing_pauses_and_gives_up(life):
    pauses = [life.handle(RunFailed(problem(), -1.0)).pause]
    pauses += [life.handle(RestartEnded(problem(Cause.FAILED))).pause for _ in range(2)]
    assert pauses == [0.0, 0.5, 1.0]
    given_up = life.handle(RestartEnded(problem(Cause.TIMED_OUT)))
    assert isinstance(given_up, ShutDown)
    assert "it failed again after 3 restarts" in str(given_up.error)
    life.handle(ShutDownEnded(None))


def test_a_restart_that_cannot_help_is_not_tried_again(life):
    life.handle(RunFailed(problem(), 5.0))
    other = problem(Cause.FAILED, StateError("topology 'words'", "its state does not fit"))
    assert life.handle(RestartEnded(other)) == ShutDown(drain=False, running=False, error=other.error)
    life.handle(ShutDownEnded(None))


@pytest.mark.parametrize("drain", [True, False])
def test_the_end(life, drain):
    assert life.handle(KillRequested(drain)) == ShutDown(drain=drain, running=True, error=None)
    assert life.handle(KillRequested(False)) is None, "it is ending already"
    life.handle(ShutDownEnded(None))
    assert life.state == "ended"


def test_an_error_on_the_way_to_the_end(life):
    life.handle(KillRequested(True))
    life.handle(ShutDownEnded(TopologyFailed("component 'count'", "it raised")))
    assert life.state == "failed"


def test_what_is_being_restarted_cannot_be_drained(life):
    life.handle(RunFailed(problem(), 5.0))
    assert life.handle(RestartEnded(problem(Cause.CANCELLED))) is None
    assert life.handle(KillRequested(True)) == ShutDown(drain=False, running=False, error=None)
    life.handle(ShutDownEnded(None))


@pytest.mark.parametrize("phase", sorted(TopologyPhase, key=str))
@pytest.mark.parametrize(
    "event",
    [StartEnded(None), RestartEnded(None), ShutDownEnded(None), ChangeEnded(None)],
    ids=lambda e: type(e).__name__,
)
def test_no_event_leads_past_the_table(phase, event):
    made = in_phase(phase)
    before = made.phase
    try:
        made.handle(event)
    except AssertionError:
        assert made.phase is before
    assert made.phase is before or made.phase in TRANSITIONS[before]


def test_messages_name_the_state():
    assert "it is ended, not running" in str(lifecycle.not_running("topology 'words'", "ended"))


def test_a_lost_lease_ends_a_topology_whose_restart_was_cancelled():
    """The restart was cancelled by a kill that is not handled yet. The phase must not stay as it is for ever."""
    made = in_phase(TopologyPhase.RESTARTING)
    assert made.handle(RestartEnded(problem(Cause.CANCELLED))) is None
    superseded = problem(Cause.FAILED, StateError("topology 'words'", "another driver has taken over"))
    assert made.handle(RunFailed(superseded, 0.0)) == ShutDown(False, False, superseded.error)
