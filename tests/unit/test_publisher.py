"""When a worker's sinks publish, and when they do not any more."""

import math
from types import SimpleNamespace

import pytest

from penstock import SimulatedClock
from penstock.errors import ComponentError, SinkRefused
from penstock.worker.background import PublishEpoch, PublishResult
from penstock.worker.publisher import Publisher


class Sink:
    """One sink task as the publisher sees it."""

    context = SimpleNamespace(task=7)

    def on_committed(self, epoch):
        pass

    def to_publish(self, epoch):
        return epoch

    def on_published(self, epoch, committed, error):
        return error


class Tasks:
    def __init__(self):
        self.all = self.sinks = [Sink()]


@pytest.fixture
def clock():
    return SimulatedClock()


@pytest.fixture
def publisher(clock):
    return Publisher(clock, Tasks())


def result(epoch, error=None):
    return PublishResult(epoch, {7: epoch}, {} if error is None else {7: error})


def test_a_committed_epoch_is_published_once(publisher):
    assert publisher.next_job() is None
    publisher.on_committed(1)
    assert publisher.next_job() == PublishEpoch(1, [1])
    assert publisher.next_job() is None, "one job at a time"
    assert publisher.finish(result(1))
    assert publisher.next_job() is None
    assert publisher.wait() == math.inf


def test_a_sink_that_is_away_is_asked_again_after_a_second(publisher, clock):
    publisher.on_committed(1)
    publisher.next_job()
    assert not publisher.finish(result(1, ComponentError("sink", "it is away")))
    assert publisher.next_job() is None
    assert publisher.wait() == 1.0
    clock.advance(1.0)
    assert publisher.next_job() == PublishEpoch(1, [1])


def test_a_sink_that_refused_is_not_asked_again(publisher, clock):
    publisher.on_committed(1)
    publisher.next_job()
    with pytest.raises(SinkRefused, match="another run"):
        publisher.finish(result(1, SinkRefused("sink", "another run has opened it")))
    publisher.on_committed(2)
    clock.advance(60.0)
    assert publisher.next_job() is None
    assert publisher.wait() == math.inf
