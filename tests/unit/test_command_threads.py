"""Commands that wait do not keep others from an answer."""

import threading

import pytest

from penstock.driver.coordinator import Coordinator
from penstock.protocol.client import ask
from penstock.protocol.requests import OperatorAnswer, OperatorRequest

MOST = 32  # of one command at a time
PATIENCE = 10.0  # seconds; an answer takes milliseconds


class Operator:
    """``scale`` waits until it is released, as behind a long change."""

    def __init__(self):
        self.release, self.waiting = threading.Event(), threading.Semaphore(0)

    def __call__(self, request):
        if request.name == "scale":
            self.waiting.release()
            self.release.wait(60)
        if request.name == "broken":
            raise ValueError("a fault in the operator")
        return OperatorAnswer(f"{request.name} done")


@pytest.fixture
def operator():
    return Operator()


@pytest.fixture
def coordinator(operator):
    coordinator = Coordinator()
    coordinator.operator = operator
    coordinator.start()
    yield coordinator
    operator.release.set()
    coordinator.stop()


def send(coordinator, name, timeout=PATIENCE):
    return ask(coordinator.address, coordinator.secret, OperatorRequest(name), timeout)


@pytest.fixture
def scale(coordinator, operator):
    """Has so many ``scale`` commands wait. Returns the list that their answers go to, and their threads."""

    def scale(count):
        answers, threads = [], []
        for _ in range(count):
            thread = threading.Thread(target=lambda: answers.append(send(coordinator, "scale", 60)), daemon=True)
            thread.start()
            threads.append(thread)
        assert all(operator.waiting.acquire(timeout=PATIENCE) for _ in range(count)), (
            "they wait in vain for a thread"
        )
        return answers, threads

    return scale


def test_status_and_kill_are_answered_while_many_commands_wait(coordinator, scale, operator):
    answers, threads = scale(MOST)
    for name in ("status", "kill"):
        assert send(coordinator, name) == OperatorAnswer(f"{name} done")
    operator.release.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert answers == [OperatorAnswer("scale done")] * MOST


def test_more_commands_of_one_kind_are_refused_until_one_is_done(coordinator, scale, operator):
    _, threads = scale(MOST)
    refused = send(coordinator, "scale")
    assert refused.error == [
        "command 'scale'",
        f"{MOST} commands of this kind are waiting for their result already",
        "Try again when they are done; penstock status shows what the topology does.",
    ]
    assert refused.kind == "TopologyFailed"
    operator.release.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert send(coordinator, "scale") == OperatorAnswer("scale done")


def test_a_fault_in_the_operator_ends_only_that_connection(coordinator):
    for _ in range(MOST + 1):
        assert send(coordinator, "broken") is None
    assert send(coordinator, "status") == OperatorAnswer("status done")


def test_a_coordinator_stops_while_a_command_waits(coordinator, scale):
    answers, (thread,) = scale(1)
    coordinator.stop()
    thread.join(PATIENCE)
    assert answers == [None]
