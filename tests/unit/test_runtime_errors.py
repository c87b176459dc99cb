"""What goes wrong in user code, and on the wire: dropped, counted, named; the next tuple still works."""

import inspect
import json
import pickle
import threading

import pyarrow as pa
import pytest

from penstock import (
    BasicBolt,
    BatchBolt,
    ComponentError,
    Delivery,
    FieldCountError,
    FieldTypeError,
    FrameError,
    PenstockError,
    RichBolt,
    Settings,
    SimulatedClock,
    Spout,
    TopologyBuilder,
    UserCodeError,
    make_plan,
)
from penstock.columns import to_column
from penstock.errors import FramesLost
from penstock.frames.codec import encode
from penstock.frames.header import Header, Kind
from penstock.plan.model import WorkerId
from penstock.protocol.commands import AssignWorker, OpenTasks, RequestReport
from penstock.protocol.events import ChannelsWarm
from penstock.protocol.job import make_job
from penstock.testing import CaptureBolt, FeederSpout, LocalRunner, run_bolt
from penstock.worker.worker import Worker
from tests.helpers import BatchFeeder, Driven, Pass, line_topology, run_rows, settings_with

FILE = "test_runtime_errors.py"


def line_in(function, text):
    """``file:line`` of the line of ``function`` that holds ``text``."""
    lines, first = inspect.getsourcelines(function)
    return f"{FILE}:{first + next(number for number, line in enumerate(lines) if text in line)}"


def only_error(runner, kind):
    (error,) = runner.errors
    assert type(error) is kind
    return error


# ---- user code raises ------------------------------------------------------------------------------------


class Fussy(BasicBolt):
    def declare_output_fields(self, declarer):
        declarer.declare("x")

    def execute(self, tup, collector):
        if tup.x == 3:
            raise ValueError("not a three")
        collector.emit([tup.x])


class FussyRich(RichBolt):
    declare_output_fields = Fussy.declare_output_fields

    def prepare(self, conf, context, collector):
        self._collector = collector

    def execute(self, tup):
        if tup.x == 3:
            raise ValueError("not a three")
        self._collector.emit([tup.x])


class FussyBatch(BatchBolt):
    declare_output_fields = Fussy.declare_output_fields

    def execute_batch(self, batch, source, collector):
        if 3 in batch.column("x").to_pylist():
            raise ValueError("not a three")
        collector.emit_batch(batch)


@pytest.mark.parametrize("form", [Fussy, FussyRich])
def test_an_exception_drops_its_tuple_and_no_other(form):
    runner = run_rows(["x"], [(n,) for n in range(6)], form())
    assert runner.captured("b2") == [(0,), (1,), (2,), (4,), (5,)]
    assert (runner.stats("b1")[0].errors, runner.stats("b1")[0].executed) == (1, 6)
    text = str(only_error(runner, UserCodeError))
    line = line_in(form.execute, "raise")
    assert text == (f"component 'b1' ({line} in execute): execute raised ValueError: not a three, on Tuple(x=3).")
    assert runner.stats("b1")[0].last_error == text


def test_an_exception_drops_its_batch_and_no_other():
    runner = run_rows(["x"], [(1,), (2,)], FussyBatch())
    for rows in ([(3,), (4,)], [(5,)]):
        runner.feed("spout", rows)
        runner.run_until_idle()
    assert runner.captured("b2") == [(1,), (2,), (5,)]
    text = str(only_error(runner, UserCodeError))
    assert f"component 'b1' ({line_in(FussyBatch.execute_batch, 'raise')} in execute_batch)" in text
    assert "execute_batch raised ValueError: not a three" in text
    assert runner.stats("b1")[0].errors == 1


def test_the_bolt_works_on_after_an_error():
    runner = run_rows(["x"], [(3,)], Fussy())
    runner.feed("spout", [(3,), (7,)])
    runner.run_until_idle()
    assert runner.captured("b2") == [(7,)]
    assert runner.stats("b1")[0].errors == 2


def test_on_error_stop_raises():
    with pytest.raises(UserCodeError, match=r"component 'b1'.*not a three"):
        run_rows(["x"], [(3,)], Fussy(), settings=Settings(delivery=Delivery(on_error="stop")))


def test_run_bolt_raises():
    with pytest.raises(UserCodeError, match=r"on Tuple\(x=3\)"):
        run_bolt(Fussy(), ["x"], [(1,), (3,)])


def test_a_long_tuple_is_cut_short():
    class Raises(Pass):
        def execute(self, tup, collector):
            raise ValueError("no")

    text = str(only_error(run_rows(["x"], [("y" * 5000,)], Raises("x")), UserCodeError))
    assert "Tuple(x='yyy" in text
    assert len(text) < 500


class ReadsJson(BasicBolt):
    def execute(self, tup, collector):
        json.loads(tup.x)


def test_an_exception_in_a_library_names_the_user_s_line():
    runner = LocalRunner(line_topology(FeederSpout("x", rows=[("{",)]), ReadsJson()))
    runner.run_until_idle()
    text = str(only_error(runner, UserCodeError))
    assert "JSONDecodeError" in text
    assert line_in(ReadsJson.execute, "json.loads") in text, text


class TickRaises(CaptureBolt):
    tick_interval = 0.1

    def execute(self, tup, collector):
        if tup.is_tick:
            raise KeyError("tick")
        super().execute(tup, collector)


def test_an_exception_on_a_tick():
    runner = LocalRunner(line_topology(FeederSpout("x"), TickRaises()))
    runner.run(0.25)
    runner.feed("spout", [(1,)])
    runner.run_until_idle()
    assert runner.captured("b1") == [(1,)]
    assert runner.stats("b1")[0].errors == 2
    assert "component 'b1'" in str(runner.errors[0])
    assert "tick raised KeyError: 'tick'" in str(runner.errors[0])


class Stumbles(FeederSpout):
    def next_tuple(self):
        if self._rows and self._rows[0] == (3,):
            self._rows.popleft()
            raise OSError("lost the line")
        super().next_tuple()


def test_an_exception_in_next_tuple():
    runner = LocalRunner(line_topology(Stumbles("x", rows=[(n,) for n in range(6)]), CaptureBolt()))
    runner.run(0.2)
    assert runner.captured("b1") == [(0,), (1,), (2,), (4,), (5,)]
    text = str(only_error(runner, UserCodeError))
    line = line_in(Stumbles.next_tuple, "raise")
    assert text == f"component 'spout' ({line} in next_tuple): next_tuple raised OSError: lost the line."
    assert runner.stats("spout")[0].errors == 1


def test_an_exception_in_next_tuple_with_stop():
    runner = LocalRunner(
        line_topology(
            Stumbles("x", rows=[(3,)]), CaptureBolt(), settings=Settings(delivery=Delivery(on_error="stop"))
        )
    )
    with pytest.raises(UserCodeError, match=r"component 'spout'.*lost the line"):
        runner.run(0.1)


class StumblesInBatches(BatchFeeder):
    def next_batch(self):
        if self._batches:
            self._batches.popleft()
            raise OSError("lost the line")


def test_an_exception_in_next_batch_names_the_call():
    runner = LocalRunner(line_topology(StumblesInBatches("x", batches=[1]), CaptureBolt()))
    runner.run(0.1)
    assert "next_batch raised OSError" in str(only_error(runner, UserCodeError))


class AckRaises(FeederSpout):
    def ack(self, msg_id):
        if msg_id == (1,):
            raise ValueError("ack fails")
        super().ack(msg_id)


def test_an_exception_in_ack_is_counted_and_the_other_acks_come():
    runner = LocalRunner(line_topology(AckRaises("x", rows=[(0,), (1,), (2,)]), CaptureBolt()))
    runner.run_until_idle()
    assert runner.captured("b1") == [(0,), (1,), (2,)]
    assert runner.component("spout")[0].acked == [(0,), (2,)]
    assert "component 'spout'" in str(only_error(runner, UserCodeError))
    assert "ack raised ValueError: ack fails" in str(runner.errors[0])


class PrepareRaises(CaptureBolt):
    def prepare(self, conf, context):
        raise ConnectionError("no store")


def test_an_exception_in_prepare_ends_the_start():
    with pytest.raises(UserCodeError) as caught:
        LocalRunner(line_topology(FeederSpout("x"), PrepareRaises()))
    assert f"component 'b1' ({line_in(PrepareRaises.prepare, 'raise')} in prepare)" in str(caught.value)
    assert "prepare raised ConnectionError: no store" in str(caught.value)


# ---- what is emitted -------------------------------------------------------------------------------------


class Emits(Spout):
    """Emits what it was made with, one ``emit`` call each."""

    def __init__(self, fields, *calls, direct=False):
        self._fields, self._calls, self._direct = fields, list(calls), direct

    def declare_output_fields(self, declarer):
        declarer.declare(*self._fields, direct=self._direct)

    def open(self, conf, context, collector):
        self._collector = collector

    def next_tuple(self):
        if self._calls:
            call = self._calls.pop(0)
            call(self._collector)


def emitted(fields, *calls, bolt=None):
    runner = LocalRunner(line_topology(Emits(fields, *calls), bolt or CaptureBolt()))
    runner.run(0.2)
    return runner


FIELDS = ["a", "b", "c", "d"]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("given", [0, 1, 2, 3, 4, 5])
def test_the_number_of_values_is_the_number_of_fields(count, given):
    good, values = list(range(count)), list(range(given))
    runner = emitted(FIELDS[:count], lambda c: c.emit(values), lambda c: c.emit(good))
    if given == count:
        assert runner.captured("b1") == [tuple(good)] * 2
        return
    assert runner.captured("b1") == [tuple(good)]
    text = str(only_error(runner, FieldCountError))
    assert "component 'spout', stream 'default'" in text
    assert f"({FILE}:" in text
    assert f"({', '.join(FIELDS[:count])}), but {given} value" in text
    assert f" emitted: {values!r}." in text
    assert "one value per declared field" in text


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("value", ["word", "a", "ab", "abc", 7, None])
def test_a_bare_value_is_no_tuple(count, value):
    runner = emitted(FIELDS[:count], lambda c: c.emit(value))
    assert runner.captured("b1") == []
    assert f"but {value!r} was emitted. Wrap it: emit([{value!r}])." in str(only_error(runner, FieldCountError))


@pytest.mark.parametrize("bad", ["text", 1.5, 2**64, {}], ids=str)
def test_a_value_of_another_type_drops_its_tuple_and_no_other(bad):
    calls = [lambda c, v=value: c.emit([v, "x"]) for value in (1, 2, bad, 4)]
    runner = emitted([("n", int), "s"], *calls)
    assert runner.captured("b1") == [(1, "x"), (2, "x"), (4, "x")]
    text = str(only_error(runner, FieldTypeError))
    assert "component 'spout', stream 'default': field 'n' is declared int64" in text
    assert f"but {bad!r} of type {type(bad).__name__} does not fit. Emit a value of that type" in text
    assert runner.stats("spout")[0].errors == 1


def test_the_only_value_of_a_frame_does_not_fit():
    runner = emitted([("n", int)], lambda c: c.emit(["text"]))
    assert "field 'n' is declared int64" in str(only_error(runner, FieldTypeError))
    assert runner.captured("b1") == []
    runner.run(0.1)
    assert len(runner.errors) == 1


def test_a_value_that_cannot_be_pickled():
    runner = emitted(["x"], lambda c: c.emit([threading.Lock()]), lambda c: c.emit([1]))
    assert runner.captured("b1") == [(1,)]
    text = str(only_error(runner, FieldTypeError))
    assert "field 'x' is declared without a type, but <unlocked" in text
    assert "Emit a value that can be pickled." in text


def test_an_unknown_stream():
    runner = emitted(["x"], lambda c: c.emit([1], stream="defautl"), lambda c: c.emit([2]))
    assert runner.captured("b1") == [(2,)]
    text = str(only_error(runner, ComponentError))
    assert f"component 'spout' ({FILE}:" in text
    assert (
        "it emitted on stream 'defautl', which it does not declare (it declares default). Did you mean 'default'?"
        in text
    )


class EmitsBatch(BatchFeeder):
    def next_batch(self):
        if self._batches:
            self._batches.popleft()(self._collector)


@pytest.mark.parametrize(
    ("emit", "kind", "parts"),
    [
        (lambda c: c.emit_batch({"n": [1], "s": ["a"]}, stream="x"), ComponentError, ["stream 'x'"]),
        (lambda c: c.emit_batch({"n": [1]}), FieldCountError, ["has 2 fields (n, s)", "['n']"]),
        (lambda c: c.emit_batch({"n": [1], "z": [1]}), FieldCountError, ["has 2 fields (n, s)", "['n', 'z']"]),
        (lambda c: c.emit_batch([[1]]), FieldCountError, ["has 2 fields (n, s)", "but 1 value was emitted"]),
        (lambda c: c.emit_batch([[1, 2], ["a"]]), FieldCountError, ["have different lengths", "n: 2, s: 1"]),
        (lambda c: c.emit_batch([["a"], ["a"]]), FieldTypeError, ["field 'n' is declared int64"]),
        (lambda c: c.emit_batch([pa.array(["a"]), ["a"]]), FieldTypeError, ["field 'n' is declared int64"]),
        (lambda c: c.emit_batch([[1.5], ["a"]]), FieldTypeError, ["field 'n' is declared int64"]),
        (
            lambda c: c.emit_batch_direct(2, [[1], ["a"]]),
            ComponentError,
            ["emit_direct was called, but the stream is not direct"],
        ),
    ],
)
def test_wrong_batches(emit, kind, parts):
    def good(collector):
        collector.emit_batch([[7], ["fine"]])

    runner = LocalRunner(line_topology(EmitsBatch(("n", int), "s", batches=[emit, good]), CaptureBolt()))
    runner.run(0.2)
    assert runner.captured("b1") == [(7, "fine")]
    text = str(only_error(runner, kind))
    for part in ["component 'spout'", f"({FILE}:", *parts]:
        assert part in text, text


def direct(*calls):
    builder = TopologyBuilder()
    builder.set_spout("spout", Emits(["x"], *calls, direct=True))
    builder.set_bolt("sink", CaptureBolt(), 2).direct_grouping("spout")
    runner = LocalRunner(builder.build("t"))
    runner.run(0.2)
    return runner


def test_emit_direct_to_a_task_of_nobody():
    runner = direct(lambda c: c.emit_direct(9, [1]), lambda c: c.emit_direct(3, [2]))
    assert [tup.x for tup in runner.captured("sink")] == [2]
    text = str(only_error(runner, ComponentError))
    assert "component 'spout', stream 'default'" in text
    named = "named task 9, which is not a task of a subscriber ([2, 3]). The ids of"
    assert named in text


def test_a_plain_emit_on_a_direct_stream():
    runner = direct(lambda c: c.emit([1]), lambda c: c.emit_direct(2, [2]))
    assert [tup.x for tup in runner.captured("sink")] == [2]
    assert (
        "emit was called, but the stream is direct. Call emit_direct(task, values) and name the receiving task."
        in str(runner.errors[0])
    )


def test_emit_direct_on_a_plain_stream():
    runner = emitted(["x"], lambda c: c.emit_direct(2, [1]))
    assert "emit_direct was called, but the stream is not direct. Declare it with direct=True." in str(
        only_error(runner, ComponentError)
    )


def test_a_misfit_on_a_direct_stream_leaves_the_others_their_tasks():
    builder = TopologyBuilder()
    calls = [
        lambda c, task=task, x=x: c.emit_direct(task, [x]) for task, x in [(2, 20), (3, "bad"), (3, 30), (2, 21)]
    ]
    builder.set_spout("spout", Emits([("x", int)], *calls, direct=True))
    builder.set_bolt("sink", CaptureBolt(), 2).direct_grouping("spout")
    runner = LocalRunner(builder.build("t"))
    runner.run(0.2)
    assert [[tup.x for tup in bolt.tuples] for bolt in runner.component("sink")] == [[20, 21], [30]]


def test_a_wrong_emit_leaves_no_half_tuple():
    runner = emitted(["a", "b", "c"], lambda c: c.emit([1, 2]), lambda c: c.emit([1, 2, 3]))
    assert runner.captured("b1") == [(1, 2, 3)]


# ---- the wire --------------------------------------------------------------------------------------------


def sink_worker(fields=("x",), **settings):
    """The worker of ``b1``: task 2, fed by task 1."""
    topology = line_topology(FeederSpout(*fields), CaptureBolt(), settings=settings_with(**settings))
    job = make_job(topology, make_plan(topology), "", pickle.dumps)
    worker = Driven(Worker(WorkerId(1, 0), job, SimulatedClock(), AssignWorker(0)))
    worker.tell(OpenTasks({}))
    return worker


def frame(values, **header):
    whole = Header(Kind.DATA, 1, 0, 0, 0, target_task=2, source_task=1)._replace(**header)
    return pa.py_buffer(encode(whole, pa.RecordBatch.from_arrays([to_column(values, None)], ["x"]), None))


def got_by(worker):
    return [tup.x for tup in worker.now.executors[0].component.tuples]


def test_a_good_frame_is_executed():
    worker = sink_worker()
    assert worker.offer(frame([1, 2]))
    worker.turn()
    assert got_by(worker) == [1, 2]
    worker.tell(RequestReport(1))
    assert (worker.events[-1].frames_done, worker.events[-1].pending) == (1, 0)


def test_garbage_is_no_frame():
    with pytest.raises(FrameError, match="begins with"):
        sink_worker().offer(pa.py_buffer(b"garbage " * 20))


@pytest.mark.parametrize("fields", [("x",), (("x", int),)], ids=["untyped", "typed"])
@pytest.mark.parametrize(
    "body", [b"", b"garbage " * 20, b"\xff" * 64, bytes(64)], ids=["empty", "text", "ones", "zeros"]
)
def test_an_undecodable_body_names_the_component(fields, body):
    worker = sink_worker(fields)
    head = Header(Kind.DATA, 1, 0, 0, 0, target_task=2, source_task=1, rows=1).pack()
    assert worker.offer(pa.py_buffer(head + body))
    with pytest.raises(FrameError) as caught:
        worker.turn()
    text = str(caught.value)
    assert "component 'b1', task 2: a frame from task 1 cannot be decoded" in text
    assert "same versions of Penstock and pyarrow" in text


def test_a_frame_of_an_unknown_stream_names_the_component():
    worker = sink_worker()
    worker.offer(frame([1], stream=77))
    with pytest.raises(FrameError, match="component 'b1', task 2"):
        worker.turn()


def test_a_frame_for_a_task_that_is_not_here():
    with pytest.raises(PenstockError, match=r"worker 1.0: a frame for task 9 arrived, but it runs tasks \[2\]"):
        sink_worker().offer(frame([1], target_task=9))


def test_a_frame_for_a_stage_that_lies_behind():
    worker = sink_worker()
    with pytest.raises(PenstockError, match=r"worker 1\.0"):
        worker.offer(frame([1], target_stage=0)) and worker.turn()


def test_a_full_inbox_refuses_and_takes_again_later():
    worker = sink_worker(inbox_capacity=3, flow="none")
    assert worker.offer(frame([1, 2], sequence=0))
    assert worker.offer(frame([3, 4], sequence=1))  # one frame may reach over
    assert not worker.offer(frame([5], sequence=2))
    assert worker.now.pending >= 4
    worker.turn()
    assert worker.offer(frame([5], sequence=2))
    for _ in range(3):
        worker.turn()
    assert got_by(worker) == [1, 2, 3, 4, 5]
    assert not worker.now.errors


@pytest.mark.parametrize(
    ("numbers", "texts"),
    [
        ((0, 1, 2), []),
        ((0, 2, 3), ["frame 2 from task 1 arrived where frame 1 was next"]),
        ((0, 0), ["frame 0 from task 1 arrived where frame 1 was next"]),
        ((1,), ["frame 1 from task 1 arrived where frame 0 was next"]),
    ],
)
def test_lost_and_doubled_frames_are_reported(numbers, texts):
    worker = sink_worker()
    for sequence in numbers:
        worker.offer(frame([sequence], sequence=sequence))
        worker.turn()
    assert got_by(worker) == list(numbers)
    assert len(worker.now.errors) == len(texts)
    for error, text in zip(worker.now.errors, texts, strict=True):
        assert f"component 'b1', task 2: {text}" in str(error)
        assert "lost, duplicated or reordered" in str(error)
    assert worker.now.stats[2].errors == len(texts)


@pytest.mark.parametrize("numbers", [(0, 2), (0, 0), (1,)])
def test_exactly_once_a_gap_is_raised_so_that_the_topology_starts_again_from_its_last_commit(numbers):
    worker = sink_worker(delivery="exactly_once")
    for sequence in numbers[:-1]:
        worker.offer(frame([sequence], sequence=sequence, epoch=1))
        worker.turn()
    worker.offer(frame([9], sequence=numbers[-1], epoch=1))
    with pytest.raises(FramesLost, match=r"component 'b1', task 2: frame \d from task 1 arrived where frame"):
        worker.turn()
    assert got_by(worker) == list(numbers[:-1]), "it is not executed"


def test_a_warm_frame_is_no_data():
    worker = sink_worker()
    worker.turn()
    assert ChannelsWarm() not in worker.events
    assert worker.offer(pa.py_buffer(Header(Kind.WARM, 1, 0, 0, 0).pack()))
    worker.turn()
    assert ChannelsWarm() in worker.events
    assert got_by(worker) == []


# ---- sys.exit() in user code ---------------------------------------------------------------------------------


class Exiting(BasicBolt):
    def declare_output_fields(self, declarer):
        declarer.declare("x")

    def execute(self, tup, collector):
        if tup.x == 3:
            raise SystemExit(7)
        collector.emit([tup.x])


def test_exit_in_execute_costs_one_tuple():
    runner = run_rows(["x"], [(1,), (2,), (3,), (4,)], Exiting())
    assert [tup.x for tup in runner.component("b2")[0].tuples] == [1, 2, 4]
    assert "execute raised SystemExit: 7" in str(only_error(runner, UserCodeError))


# ---- a call that does not return -----------------------------------------------------------------------------


class Slow(BasicBolt):
    def __init__(self):
        self.seen = None

    def execute(self, tup, collector):
        self.clock.advance(12.0)
        self.seen = self.look()


def test_a_report_says_for_how_long_a_task_has_been_in_its_component():
    runner = LocalRunner(line_topology(FeederSpout("x", rows=[(1,)]), Slow()))
    (bolt,) = runner.component("b1")
    (slot,) = [slot for slot in runner._slots.values() if slot.id.stage == 1]

    def look():  # as the heartbeat thread does, while the loop is inside execute
        slot.host.heartbeat()
        slot.host.heartbeat()
        return [stats.in_call for stats in runner.bus.tasks().values()]

    bolt.clock, bolt.look = runner.clock, look
    runner.run_until_idle()
    assert bolt.seen == [0.0, 12.0]
    runner.report()
    assert [stats.in_call for stats in runner.bus.tasks().values()] == [0.0, 0.0]
