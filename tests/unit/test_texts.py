"""Texts, reports and messages are limited in size."""

import io
import json
import pickle
import zlib
from types import SimpleNamespace

import pytest

from penstock import BasicBolt, Delivery, RichBolt, Settings, TopologyBuilder, Transport, signing
from penstock.driver.coordinator import Coordinator
from penstock.errors import ControlRefused, PenstockError, SnapshotCorrupt, UserCodeError
from penstock.metrics.bus import MetricsBus
from penstock.metrics.stats import TaskStats
from penstock.plan.planner import make_plan
from penstock.protocol import codec, wire
from penstock.protocol.client import ControlClient, framed
from penstock.protocol.commands import OpenTasks
from penstock.protocol.events import Hello, SnapshotFailed, WorkerFailed, WorkerReport
from penstock.protocol.requests import OperatorRequest
from penstock.replay.records import decode
from penstock.spark.session import _lines
from penstock.state import manifest
from penstock.state.manifest import Manifest
from penstock.testing import CaptureBolt, FeederSpout, LocalRunner
from penstock.texts import MOST_CELL, MOST_ERROR, MOST_LINE, bounded_cell, bounded_repr, parse_json, shortened
from penstock.topology.tuples import tuple_type
from penstock.worker.failures import blame

LONG = "x" * 2_000_000
DEEP = "[" * 100_000 + "]" * 100_000


def test_a_long_text_keeps_its_beginning_and_its_end():
    cut = shortened("begin" + LONG + "end", 100)
    assert len(cut) == 100
    assert cut.startswith("beginxx")
    assert cut.endswith("xxend")
    assert " … [shortened, 2,000,008 characters in all] … " in cut
    assert shortened(cut, 100) == cut
    assert shortened("short", 100) == "short"


def test_the_parts_of_an_error_are_bounded():
    error = PenstockError(LONG, LONG, LONG)
    assert len(str(error)) < 3 * MOST_ERROR + 20
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_password_at_a_cut_does_not_show():
    for position in range(2_940, 3_060, 9):
        secret, around = " password=hunter2hunter2 ", "y" * position
        assert "hunter2" not in PenstockError("here", around + secret + LONG).problem
        assert "hunter2" not in PenstockError("here", LONG + secret + around).problem


def test_what_user_code_raises_is_bounded():
    error = blame("b", "execute", ValueError(LONG), tuple_type("a", "s", 1, ("line", "n"))((LONG, 7)))
    assert isinstance(error, UserCodeError)
    assert len(error.problem) <= MOST_ERROR
    assert error.problem.startswith("execute raised ValueError: xxx")
    assert error.problem.endswith(", n=7)")
    assert "on Tuple(line='xxx" in error.problem


class Unshowable:
    def __repr__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value",
    [LONG, LONG.encode(), [LONG] * 100, 10**5000, Unshowable(), {LONG: [DEEP]}],
    ids=["text", "bytes", "list", "digits", "raises", "dict"],
)
def test_a_repr_is_bounded_and_does_not_raise(value):
    assert 0 < len(bounded_repr(value)) <= 200
    assert len(str(bounded_cell(value))) <= MOST_CELL
    assert blame("b", "execute", ValueError("no"), (value, 1)).problem.startswith(
        "execute raised ValueError: no, on ("
    )


@pytest.mark.parametrize("value", ["short", 7, 2**63, 1.5, None, True])
def test_ordinary_cells_stay_as_they_are(value):
    assert bounded_cell(value) == value
    assert type(bounded_cell(value)) is type(value)


class Shower(BasicBolt):
    def prepare(self, conf, context):
        self.publish = context.publish

    def execute(self, tup, collector):
        self.publish([[LONG, tup.line]] * 3000)
        raise ValueError(LONG)


class Lines(FeederSpout):
    def open(self, *arguments):
        super().open(*arguments)
        self.failures = []

    def fail(self, msg_id, failure):
        self.failures.append(failure)


class Failing(RichBolt):
    def prepare(self, conf, context, collector):
        self.collector = collector

    def execute(self, tup):
        self.collector.fail(tup, LONG)


@pytest.mark.parametrize("bolt", [Shower, Failing])
def test_what_a_worker_reports_of_two_long_lines_is_small(bolt):
    builder = TopologyBuilder()
    builder.set_spout("lines", Lines("line"))
    builder.set_bolt("bolt", bolt()).shuffle_grouping("lines")
    runner = LocalRunner(
        builder.build("t", Settings(delivery=Delivery("at_least_once"), transport=Transport(fusing=False)))
    )
    runner.feed("lines", [(LONG,), (LONG,)])
    runner.run(1.0)
    runner.report()
    workers = [worker.inspect() for worker in runner.workers.values()]
    texts = [str(error) for worker in workers for error in worker.errors]
    texts += [stats.last_error for worker in workers for stats in worker.stats.values()]
    assert sum(map(len, texts)) < 100_000
    assert len(json.dumps(runner.bus.published())) < 3_000_000
    (spout,) = runner.component("lines")
    assert [len(failure.error) <= 4 * MOST_ERROR for failure in spout.failures] == [True, True]
    runner.close()


def test_lines_that_the_jvm_prints_are_cut():
    stream = io.BytesIO(b"one\n" + b"y" * 40_000 + b"\ntwo\n" + b"z" * 20_000)
    one, long, two, last = _lines(stream)
    assert (one, two) == (b"one\n", b"two\n")
    assert long == b"y" * MOST_LINE + b" ... [24001 more bytes]"
    assert last.endswith(b" ... [4000 more bytes]")
    assert list(_lines(io.BytesIO(b"w" * MOST_LINE + b"\nend\n"))) == [b"w" * MOST_LINE, b"end\n"]


# ---- the control connection -------------------------------------------------------------------------------------


def sent(message):
    data = framed(message)
    (length,) = wire.LENGTH.unpack(data[: wire.LENGTH.size])
    assert length == len(data) - wire.LENGTH.size <= wire.MOST_BYTES
    return codec.decode_event(data[wire.LENGTH.size :])


def test_a_report_that_is_too_long_goes_without_what_users_put_in_it():
    rows = {1: [["x" * (wire.MOST_BYTES + 1)]]}
    report = sent(WorkerReport(3, 2, 1, 0.5, 9, {1: TaskStats()}, rows, ["earlier"], probe=4))
    assert (report.frames_sent, report.probe, report.published) == (3, 4, {})
    (error,) = report.errors
    assert error.startswith("control connection: a message of 67,")


@pytest.mark.parametrize("stats", [TaskStats(lag={"p": 1 << 70}), TaskStats(last_error="\udcff")])
def test_a_report_goes_without_what_users_put_into_the_counters_too(stats):
    stats.executed, stats.away = 12, 3.0
    report = sent(WorkerReport(3, 2, 1, 0.5, 9, {1: stats}, settled_below={1: 5}))
    assert report.tasks == {1: TaskStats(executed=12, away=3.0)}
    assert (report.frames_sent, report.settled_below) == (3, {1: 5})
    (error,) = report.errors
    assert error.startswith("control connection: WorkerReport cannot be sent: ")
    assert stats.lag or stats.last_error, "the counters themselves are not changed"


def test_another_message_that_is_too_long_fails_the_worker_with_the_reason():
    failed = sent(SnapshotFailed(3, "x" * (wire.MOST_BYTES + 1)))
    assert isinstance(failed, WorkerFailed)
    assert failed.problem.endswith(" is longer than the limit of 67,108,864 bytes")
    assert failed.hint.startswith("The state of a task, a sink's token")


def test_the_driver_does_not_send_one_either():
    with pytest.raises(ControlRefused, match=r"67,.* bytes is longer than the limit of 67,108,864 bytes"):
        wire.framed(codec.encode(OpenTasks({"1.0": "x" * (wire.MOST_BYTES + 1)})))


@pytest.fixture
def joined():
    """The connection of a worker and the driver's registry of workers."""
    builder = TopologyBuilder()
    builder.set_spout("words", FeederSpout("word"))
    builder.set_bolt("show", CaptureBolt()).shuffle_grouping("words")
    plan = make_plan(builder.build("t"))
    coordinator = Coordinator()
    coordinator.start()
    registry = coordinator.begin(0, plan, MetricsBus(plan), 1)
    client = ControlClient(coordinator.address, coordinator.secret, lambda: None)
    client.send(Hello(0, 0, 0, 1, "here"))
    assert coordinator.wait(lambda: bool(registry.workers), 10)
    yield coordinator, registry, client
    client.close()
    coordinator.stop()


def test_a_message_that_is_too_long_for_the_driver_is_the_reason_of_the_failure(joined):
    coordinator, registry, client = joined
    client._sender._socket.sendall(wire.LENGTH.pack(75_000_000))
    assert coordinator.wait(lambda: registry.failure is not None, 10)
    assert registry.failure.where == "worker 0.0, control connection"
    assert registry.failure.problem == "a message of 75,000,000 bytes is longer than the limit of 67,108,864 bytes"


def test_a_worker_says_what_it_could_not_read(joined):
    coordinator, registry, client = joined
    connection = next(iter(registry.workers.values()))
    coordinator._soon(lambda: connection.writer.write(wire.LENGTH.pack(75_000_000)))
    assert coordinator.wait(lambda: registry.failure is not None, 10)
    assert registry.failure.problem == "a message of 75,000,000 bytes is longer than the limit of 67,108,864 bytes"
    assert "a message of 75,000,000 bytes" in client.lost_because


# ---- JSON that is nested too deeply ----------------


def test_json_that_is_nested_too_deeply_is_malformed():
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(DEEP)
    assert parse_json(b'{"a": [1]}') == {"a": [1]}


def test_a_message_that_is_nested_too_deeply_is_refused():
    deep = b"\x91" * 100_000
    for data in (deep, codec.encode(OperatorRequest("set", {}))[:-1] + b"\x81\xa1a" + deep):
        with pytest.raises(ControlRefused, match="a message does not follow the protocol"):
            codec.decode_event(data)


def test_a_replay_record_that_is_nested_too_deeply_is_damaged():
    found = decode(b"J" + DEEP.encode())
    assert found.damaged
    assert found.error == "ValueError: the JSON is nested too deeply"


def test_a_manifest_that_is_nested_too_deeply_is_corrupt():
    class Store:
        url = "memory://x"

        def read(self, name):
            text = DEEP.encode()
            signature = signing.sign(manifest._PURPOSE, text).hex().encode()
            return b"%b\n%08x %b\n" % (text, zlib.crc32(text), signature)

    with pytest.raises(
        SnapshotCorrupt, match=r"^manifest memory://x/.*: it is not valid JSON \(the JSON is nested too"
    ):
        Manifest.read(Store(), SimpleNamespace(file="m"))


# ---- what MessagePack cannot hold ------------------------------------------------


def test_a_lone_surrogate_in_an_error_fails_the_tuple_and_not_the_topology():
    class Odd(BasicBolt):
        def execute(self, tup, collector):
            raise ValueError("caf\udce9")

    builder = TopologyBuilder()
    builder.set_spout("words", FeederSpout("word"))
    builder.set_bolt("odd", Odd()).shuffle_grouping("words")
    runner = LocalRunner(builder.build("t", Settings(delivery=Delivery("at_least_once"))))
    runner.feed("words", [["a"]])
    runner.run(1.0)
    (stats,) = runner.stats("odd")
    assert stats.errors >= 1
    assert "caf\\udce9" in stats.last_error


@pytest.mark.parametrize(
    ("cell", "shown"), [(1 << 64, str(1 << 64)), (-(1 << 63) - 1, str(-(1 << 63) - 1)), ("\udce9", "\\udce9")]
)
def test_a_cell_can_always_be_sent(cell, shown):
    assert bounded_cell(cell) == shown
