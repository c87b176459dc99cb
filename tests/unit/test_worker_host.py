"""Errors of the reader thread, and what the host of a worker makes of them."""

import pyarrow as pa
import pytest

from penstock import Settings, TopologyBuilder
from penstock.testing import CaptureBolt, FeederSpout, LocalRunner


@pytest.fixture
def runner():
    builder = TopologyBuilder()
    builder.set_spout("words", FeederSpout("word"))
    builder.set_bolt("show", CaptureBolt()).fields_grouping("words", "word")
    return LocalRunner(builder.build("t", Settings()))


def receiver(runner):
    return next(slot.host for id, slot in runner._slots.items() if id.stage == 1)


def broken(frame):
    raise ValueError("write to closed file")


def test_an_error_of_the_reader_fails_the_worker(runner):
    host = receiver(runner)
    host.fail(ValueError("write to closed file"))
    host.step()
    assert "ValueError: write to closed file" in runner.registry.failure.problem


def test_an_error_of_the_reader_before_the_end_is_reported_although_the_tasks_are_closed_next(runner):
    host = receiver(runner)
    host.fail(ValueError("write to closed file"))
    with pytest.raises(ValueError, match="closed file"):
        runner.close()
    assert not runner.registry.all_closed
    assert "ValueError: write to closed file" in runner.registry.failure.problem


def test_an_error_of_the_reader_after_the_tasks_are_closed_is_no_failure(runner):
    runner.close()
    host = receiver(runner)
    host.fail(ValueError("write to closed file"))
    host.step()
    assert runner.registry.all_closed
    assert runner.registry.failure is None


def test_the_reader_goes_on_after_an_error_that_comes_from_closing(runner, monkeypatch):
    host, frame = receiver(runner), pa.py_buffer(b"")
    monkeypatch.setattr(host.worker.intake, "offer", broken)
    with pytest.raises(ValueError, match="closed file"):
        host.deliver(frame)
    runner.close()
    host.deliver(frame)
