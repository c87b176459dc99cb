"""``emit`` and the rows of a frame, in C and in pure Python: one set of expectations for both forms."""

from __future__ import annotations

import gc
import importlib.util
import os
import pickle
import subprocess
import sys
import tracemalloc
import zipfile
from collections import namedtuple
from operator import length_hint
from pathlib import Path

import pytest

from penstock import BasicBolt, ComponentError, Delivery, FieldCountError, Settings, Spout, TopologyBuilder, native
from penstock.acking.pending import Pending
from penstock.metrics.stats import TaskStats
from penstock.testing import CaptureBolt, LocalRunner
from penstock.topology.streams import OutputDeclarer
from penstock.topology.tuples import rows_of, tuple_type
from penstock.worker.collectors import RichTupleCollector, SpoutTupleCollector, TupleCollector
from penstock.worker.outputs import StreamOutput
from penstock.worker.tracking import MessageIds, Tracker
from tests.helpers import executors_of

ROOT = Path(__file__).parents[2]


def module_at(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


builder = module_at("native_build", ROOT / "native" / "build.py")


@pytest.fixture(scope="session")
def extension(tmp_path_factory):
    """The extension, compiled from the source as it is now."""
    try:
        path = builder.build(tmp_path_factory.mktemp("native"))
    except builder.CannotBuild as error:
        pytest.skip(str(error))
    return path


@pytest.fixture(params=["pure", "native"])
def form(request, monkeypatch):
    compiled = None
    if request.param == "native":
        compiled = module_at("penstock._native", request.getfixturevalue("extension"))
    monkeypatch.setattr(native, "FORM", compiled)
    return request.param


class World:
    """A component with a default stream, a stream 'other' of one field and a direct stream 'told'."""

    def __init__(self, *fields, tracked=False, default=True):
        declarer = OutputDeclarer("words")
        if default:
            declarer.declare(*fields)
        declarer.declare("x", stream="other")
        declarer.declare("x", stream="told", direct=True)
        self.tracker = Tracker(1, "words")
        self.stats = TaskStats()
        self.outputs = {
            name: StreamOutput(
                number, stream, (), 1024, None, self.stats, None, lambda: 0.0,
                MessageIds(self.tracker, 1, Pending(30.0), lambda: 0.0) if tracked else None,
            )
            for number, (name, stream) in enumerate(declarer.streams.items())
        }  # fmt: skip

    def rows(self, stream="default"):
        return list(zip(*self.outputs[stream].columns, strict=True))

    def basic(self):
        return TupleCollector("words", self.outputs)

    def spout(self):
        return SpoutTupleCollector("words", self.outputs)


Pair = namedtuple("Pair", "a b")


class Backwards(tuple):
    """A tuple that iterates in its own way."""

    def __iter__(self):
        return iter(self[::-1])


class Listed(list):
    pass


class Text(str):
    __slots__ = ()


# ---- emit ----------------------------------------------------------------------------------------------------

TWO = tuple_type("a", "default", 1, ("a", "b"))


@pytest.mark.parametrize(
    ("values", "row"),
    [
        ([1, 2], (1, 2)),
        ((1, 2), (1, 2)),
        (Pair(1, 2), (1, 2)),
        (TWO((1, 2)), (1, 2)),
        (Listed([1, 2]), (1, 2)),
        (Backwards((1, 2)), (2, 1)),
        ({"a": 1, "b": 2}, ("a", "b")),
        (range(2), (0, 1)),
        (lambda: (number for number in (1, 2)), (1, 2)),
        (["ab", None], ("ab", None)),
    ],
)
@pytest.mark.parametrize("kind", ["basic", "spout"])
def test_two_values_of_any_kind(form, kind, values, row):
    world = World("a", "b")
    getattr(world, kind)().emit(values() if callable(values) else values)
    assert world.rows() == [row]


@pytest.mark.parametrize("kind", ["basic", "spout"])
@pytest.mark.parametrize("width", [1, 2, 3, 9])
@pytest.mark.parametrize("make", [list, tuple, Listed, lambda values: tuple_type("a", "s", 1, ("x",))(values)])
def test_streams_of_every_width(form, kind, width, make):
    world = World(*(f"f{number}" for number in range(width)))
    collector = getattr(world, kind)()
    for start in range(3):
        collector.emit(make(range(start, start + width)))
    assert world.rows() == [tuple(range(start, start + width)) for start in range(3)]


WRONG = {
    1: [
        ("a", "it has 1 field (f0), but 'a' was emitted. Wrap it: emit(['a'])."),
        ("abc", "it has 1 field (f0), but 'abc' was emitted. Wrap it: emit(['abc'])."),
        (Text("a"), "it has 1 field (f0), but 'a' was emitted. Wrap it: emit(['a'])."),
        (7, "it has 1 field (f0), but 7 was emitted. Wrap it: emit([7])."),
        (None, "it has 1 field (f0), but None was emitted. Wrap it: emit([None])."),
        ([], "it has 1 field (f0), but 0 values were emitted: []. Emit one value per declared field."),
        ((1, 2), "it has 1 field (f0), but 2 values were emitted: (1, 2). Emit one value per declared field."),
    ],
    2: [
        ("ab", "it has 2 fields (f0, f1), but 'ab' was emitted. Wrap it: emit(['ab'])."),
        (Text("ab"), "it has 2 fields (f0, f1), but 'ab' was emitted. Wrap it: emit(['ab'])."),
        ([1], "it has 2 fields (f0, f1), but 1 value was emitted: [1]. Emit one value per declared field."),
        (Pair, "it has 2 fields (f0, f1), but <class"),
    ],
    3: [
        ("abc", "it has 3 fields (f0, f1, f2), but 'abc' was emitted. Wrap it: emit(['abc'])."),
        ((1, 2), "it has 3 fields (f0, f1, f2), but 2 values were emitted: (1, 2). Emit one value"),
        ((n for n in (1, 2, 3)), "it has 3 fields (f0, f1, f2), but <generator object"),
    ],
}


@pytest.mark.parametrize("kind", ["basic", "spout"])
@pytest.mark.parametrize(("width", "values", "text"), [(w, *case) for w, cases in WRONG.items() for case in cases])
def test_a_wrong_number_of_values_is_refused_and_nothing_is_added(form, kind, width, values, text):
    world = World(*(f"f{number}" for number in range(width)))
    with pytest.raises(FieldCountError) as caught:
        getattr(world, kind)().emit(values)
    assert f"component 'words', stream 'default': {text}"[:60] in str(caught.value)
    assert text in str(caught.value)
    assert world.rows() == []
    assert not any(world.outputs["default"].columns)


def test_an_error_while_iterating_is_the_users(form):
    def values():
        yield 1
        raise KeyError("no more")

    world = World("a", "b")
    with pytest.raises(KeyError, match="no more"):
        world.basic().emit(values())
    assert world.rows() == []


def test_streams_by_name_and_by_position(form):
    world = World("x")
    collector = world.basic()
    collector.emit([1], "other")
    collector.emit([2], stream="other")
    collector.emit([3], "default")
    collector.emit([4], stream="default")
    collector.emit([5], stream="".join(["def", "ault"]))  # equal, another object
    collector.emit(values=[6])
    collector.emit([7], "default", None)
    collector.emit([8], stream="default", anchors=None)
    collector.emit([9], anchors=None)
    assert world.rows("other") == [(1,), (2,)]
    assert world.rows() == [(3,), (4,), (5,), (6,), (7,), (8,), (9,)]


def test_an_unknown_and_a_direct_stream_are_refused(form):
    collector = World("x").basic()
    with pytest.raises(ComponentError, match=r"it emitted on stream 'othr', .* Did you mean 'other'"):
        collector.emit([1], stream="othr")
    with pytest.raises(ComponentError, match="stream 'told': emit was called, but the stream is direct"):
        collector.emit([1], stream="told")


def test_a_component_without_default_stream(form):
    world = World(default=False)
    collector = world.basic()
    collector.emit([1], stream="other")
    assert world.rows("other") == [(1,)]
    with pytest.raises(ComponentError, match="it emitted on stream 'default', which it does not declare"):
        collector.emit([1])


@pytest.mark.parametrize(
    "call",
    [
        lambda emit: emit(),
        lambda emit: emit([1], "default", None, 4),
        lambda emit: emit([1], msgid=3),
        lambda emit: emit([1], values=[1]),
    ],
)
@pytest.mark.parametrize("kind", ["basic", "spout"])
def test_wrong_arguments_are_a_type_error(form, kind, call):
    world = World("x")
    with pytest.raises(TypeError, match="emit"):
        call(getattr(world, kind)().emit)
    assert world.rows() == []


@pytest.mark.parametrize("width", [1, 2])
def test_message_ids_of_untracked_spouts_are_done_at_once(form, width):
    world = World(*(f"f{number}" for number in range(width)))
    collector, values = world.spout(), list(range(width))
    collector.emit(values)
    collector.emit(values, msg_id="a")
    collector.emit(values, "default", "b")
    collector.emit(values, msg_id=None)
    collector.emit(tuple(values), stream="default", msg_id="c")
    collector.emit([1], stream="other", msg_id=0)
    assert collector.done == ["a", "b", "c", 0]
    assert len(world.rows()) == 5


@pytest.mark.parametrize("width", [1, 2])
def test_a_tracked_spout_has_one_message_id_per_row(form, width):
    world = World(*(f"f{number}" for number in range(width)), tracked=True)
    collector, values = world.spout(), list(range(width))
    collector.emit(values)
    collector.emit(values, msg_id="a")
    with pytest.raises(FieldCountError):
        collector.emit([], msg_id="lost")
    collector.emit(tuple(values), "default", "b")
    collector.emit((value for value in values), msg_id="c")
    assert world.outputs["default"].origins.ids == [None, "a", "b", "c"]
    assert collector.done == []
    assert len(world.rows()) == 4


def test_rich_collectors_take_anchors(form):
    world = World("x")
    collector = RichTupleCollector("words", world.outputs, world.stats, None)
    collector.emit([1], anchors=TWO((1, 2)))
    collector.emit([2], "default", [TWO((1, 2))])
    assert world.rows() == [(1,), (2,)]


def test_columns_that_were_sent_are_filled_again(form):
    world = World("x")
    collector = world.basic()
    collector.emit([1])
    world.outputs["default"].flush()
    collector.emit([2])
    assert world.rows() == [(2,)]


def test_emit_keeps_no_reference_but_that_in_the_column(form):
    world, value = World("x"), object()
    collector = world.spout()
    count = sys.getrefcount(value)
    for _ in range(10):
        collector.emit([value], msg_id=value)
        collector.emit((value,))
        with pytest.raises(FieldCountError):
            collector.emit([value, value])
    world.outputs["default"].flush()
    collector.done.clear()
    gc.collect()
    assert sys.getrefcount(value) == count


def test_a_collector_in_a_cycle_is_collected(form):
    world = World("x")
    marker = Listed()
    world.outputs["default"].columns[0].append(marker)
    collector = world.spout()
    collector.itself = collector
    marker.append(collector)
    gone = []

    class Witness:
        def __del__(self):
            gone.append(True)

    collector.witness = Witness()
    del world, collector, marker
    gc.collect()
    assert gone == [True]


# ---- rows ----------------------------------------------------------------------------------------------------

Word = tuple_type("split", "words", 7, ("word", "count"))
Held = tuple_type("split", "words", 7, ("word", "count"), True)


def test_rows_are_tuples_of_the_class(form):
    rows, left = rows_of(Word, [["a", "b"], [1, 2]])
    assert length_hint(left) == 2
    first = next(rows)
    assert length_hint(left) == 1
    assert (type(first), first.word, first.count, first) == (Word, "a", 1, ("a", 1))
    assert list(rows) == [("b", 2)]
    assert length_hint(left) == 0
    assert list(rows) == []


@pytest.mark.parametrize("width", [1, 2, 8, 9, 20])
@pytest.mark.parametrize("kind", ["slots", "held"])
def test_tuples_that_are_kept_do_not_change(form, width, kind):
    made = tuple_type("a", "s", 1, tuple(f"f{number}" for number in range(width)), kind == "held")
    columns = [[f"{row}.{field}" for row in range(50)] for field in range(width)]
    expected = list(zip(*columns, strict=True))
    kept, hashes = [], set()
    for number, tup in enumerate(rows_of(made, columns)[0]):
        hashes.add(hash(tup))
        assert tup == expected[number]
        if number % 3 == 0:
            kept.append(tup)
    assert kept == expected[::3]
    assert len(hashes) == 50
    assert len(list(rows_of(made, columns)[0])) == len({id(tup) for tup in list(rows_of(made, columns)[0])})


def test_what_refers_to_a_tuple_keeps_it(form):
    columns = [[f"w{number}" for number in range(30)], list(range(30))]
    iterators, closures, pickles = [], [], []
    for tup in rows_of(Word, columns)[0]:
        iterators.append(iter(tup))
        closures.append(lambda tup=tup: tup.word)
        pickles.append(pickle.dumps(tup))
    assert [list(each) for each in iterators] == [[f"w{n}", n] for n in range(30)]
    assert [call() for call in closures] == columns[0]
    assert [pickle.loads(each).count for each in pickles] == columns[1]


def test_the_native_form_uses_tuples_again_that_nobody_holds(extension):
    compiled = module_at("penstock._native", extension)
    words = [[f"w{number}" for number in range(100)], list(range(100))]
    assert len({id(tup) for tup in compiled.Rows(Word, words)}) == 2
    held = [tup for tup in compiled.Rows(Held, words) if not vars(tup).update(row=tup[1])]
    assert [tup.row for tup in held] == list(range(100))


def test_a_held_tuple_begins_without_attributes(form):
    for tup in rows_of(Held, [["a"] * 20, [1] * 20])[0]:
        assert vars(tup) == {}
        tup.__dict__["ack"] = 1


def test_rows_leak_nothing(form):
    value = object()
    column = [value] * 1000
    count = sys.getrefcount(value)
    for tup in rows_of(Word, [column, column])[0]:
        assert tup.word is value
    half, _ = rows_of(Word, [column, column])
    next(half)
    next(half)
    del half, tup, _
    assert sys.getrefcount(value) == count
    assert sys.getrefcount(Word) < 1000


def test_memory_does_not_grow(form):
    world = World("x")
    collector = world.spout()
    column = list(range(200))

    def work():
        for tup in rows_of(Word, [column, column])[0]:
            collector.emit([tup.word], msg_id=tup)
        collector.done.clear()
        world.outputs["default"].flush()

    for _ in range(20):
        work()
    tracemalloc.start()
    try:
        work()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(200):
            work()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 4096


def test_rows_in_a_cycle_are_collected(form):
    gone = []

    class Witness:
        def __del__(self):
            gone.append(True)

    value = Witness()
    rows, _ = rows_of(Word, [[value, 1], [2, 3]])
    value.tup = next(rows)
    value.rows = rows
    del value, rows, _
    gc.collect()
    assert gone == [True]


def test_the_garbage_collector_may_run_at_any_time(form):
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        columns = [[[number] for number in range(300)], [{number: number} for number in range(300)]]
        kept = [tup for tup in rows_of(Word, columns)[0] if tup.word[0] % 2]
    finally:
        gc.set_threshold(*threshold)
    assert [tup.word[0] for tup in kept] == list(range(1, 300, 2))
    assert all(gc.is_tracked(tup) for tup in kept)


def test_a_destructor_may_read_on(form):
    """A value's destructor that reads the same rows: nothing is lost and no tuple changes."""
    seen = []

    class Reads:
        def __del__(self):
            seen.extend(next(rows, ()))

    column = [Reads(), *range(1, 9)]
    rows, _ = rows_of(tuple_type("a", "s", 1, ("x",)), [column])
    first = next(rows)
    column[0] = None
    del first
    seen.extend(tup[0] for tup in rows)
    assert sorted(seen) == list(range(1, 9))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((tuple, [[1]]), TypeError, "needs a subclass of tuple"),
        ((dict, [[1]]), TypeError, "needs a subclass of tuple"),
        ((Word, [[1], [1, 2]]), ValueError, "lists of the same length"),
        ((Word, ["ab"]), ValueError, "lists of the same length"),
    ],
)
def test_the_native_rows_refuse_what_they_cannot_read(extension, arguments, error, text):
    with pytest.raises(error, match=text):
        module_at("penstock._native", extension).Rows(*arguments)


def test_a_column_that_becomes_shorter_is_an_error(extension):
    column = [1, 2, 3]
    rows = module_at("penstock._native", extension).Rows(tuple_type("a", "s", 1, ("x",)), [column])
    next(rows)
    column.clear()
    with pytest.raises(RuntimeError, match="became shorter"):
        next(rows)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((None, [[]], "default", "anchors"), "needs a callable"),
        ((print, [[]], "default", "anchors", ()), "a list or None as noted"),
        ((print, [()], "default", "anchors"), "columns that are lists"),
        ((print, [], "default", "anchors"), "at least one"),
    ],
)
def test_the_native_emit_is_made_from_lists(extension, arguments, text):
    with pytest.raises(TypeError, match=text):
        module_at("penstock._native", extension).make_emit(*arguments)


# ---- in a topology -------------------------------------------------------------------------------------------


class Lines(Spout):
    """Emits lines until there are no more. It counts the calls that found none."""

    def __init__(self, count, burst=1):
        self.left, self.burst = count, burst

    def declare_output_fields(self, declarer):
        declarer.declare("line")

    def open(self, conf, context, collector):
        self.collector, self.calls, self.vain, self.acked = collector, 0, 0, []

    def next_tuple(self):
        self.calls += 1
        self.vain += not self.left
        for _ in range(min(self.burst, self.left)):
            self.left -= 1
            self.collector.emit([f"a b {self.left}"], msg_id=self.left)

    def ack(self, msg_id):
        self.acked.append(msg_id)


class Words(BasicBolt):
    def declare_output_fields(self, declarer):
        declarer.declare("word")

    def execute(self, tup, collector):
        if tup.line == "a b 7":
            raise ValueError("seven")
        for word in tup.line.split():
            collector.emit([word])


@pytest.mark.parametrize("guarantee", ["at_most_once", "at_least_once"])
def test_a_topology_gives_the_same(form, guarantee):
    builder = TopologyBuilder()
    builder.set_spout("lines", Lines(100))
    builder.set_bolt("words", Words()).local_or_shuffle_grouping("lines")
    builder.set_bolt("capture", CaptureBolt()).shuffle_grouping("words")
    runner = LocalRunner(builder.build("same", Settings(delivery=Delivery(guarantee))))
    runner.run_until_idle()
    words = [tup.word for tup in runner.captured("capture")]
    assert words.count("a") == words.count("b") == 99
    assert sorted(int(word) for word in words if word not in "ab") == [n for n in range(100) if n != 7]
    assert "seven" in str(runner.errors[0])


def spout_of(delivery, *args):
    """A runner with one spout, and the spout's executor."""
    builder = TopologyBuilder()
    builder.set_spout("lines", Lines(*args))
    runner = LocalRunner(builder.build("spout", Settings(delivery=delivery)))
    runner.run_until_idle()
    (executor,) = executors_of(runner)
    return executor


def test_a_spout_that_emits_nothing_is_called_once(form):
    executor = spout_of(Delivery("at_most_once"), 0)
    spout = executor.component
    spout.calls = spout.vain = 0
    assert not executor.run()
    assert (spout.calls, spout.vain) == (1, 1)
    spout.left = 3
    assert executor.run()
    assert (spout.calls, spout.vain, executor.waiting()) == (5, 2, 3)


@pytest.mark.parametrize("burst", [1, 4])
def test_a_spout_never_exceeds_its_room(form, burst):
    executor = spout_of(Delivery("at_least_once", max_spout_pending=10), 0)
    spout = executor.component
    spout.burst = burst
    executor._largest = burst
    spout.left = 100
    assert executor.run()
    assert executor.waiting() == 10 // burst * burst
    assert not executor.run()


# ---- which form is used --------------------------------------------------------------------------------------


def form_in_a_process(path, **environment):
    code = "from penstock import native; print(native.FORM is not None and native.FORM.SOURCE)"
    found = {name: value for name, value in os.environ.items() if name != native.PURE}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**found, "PYTHONPATH": str(path), **environment},
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return done.stdout.strip()


@pytest.fixture
def shipped(tmp_path, extension):
    """Penstock in a zip file with the extension, as nodes get it."""
    path = tmp_path / "penstock.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for file in (ROOT / "src" / "penstock").rglob("*.py"):
            archive.write(file, file.relative_to(ROOT / "src"))
        archive.write(extension, f"penstock/{extension.name}")
    return path


def test_a_node_loads_the_extension_from_the_zip(shipped, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert form_in_a_process(shipped, TMPDIR=str(scratch)) == builder.source_hash()
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(("value", "pure"), [("1", True), ("0", False), ("", False)])
def test_the_variable_selects_pure_python(shipped, value, pure):
    assert (form_in_a_process(shipped, PENSTOCK_PURE=value) == "False") is pure


def test_another_python_runs_in_pure_python(shipped, tmp_path):
    other = tmp_path / "other.zip"
    with zipfile.ZipFile(shipped) as before, zipfile.ZipFile(other, "w") as after:
        for name in before.namelist():
            after.writestr(name.replace(".cpython-", ".cpython-9"), before.read(name))
    assert form_in_a_process(other) == "False"


def test_a_broken_extension_runs_in_pure_python(shipped, tmp_path):
    other = tmp_path / "broken.zip"
    with zipfile.ZipFile(shipped) as before, zipfile.ZipFile(other, "w") as after:
        for name in before.namelist():
            after.writestr(name, b"\x7fELF" if "_native." in name else before.read(name))
    assert form_in_a_process(other) == "False"


def test_the_extension_beside_the_sources_is_that_of_the_source():
    """Fails after a change of native.c: run ``make native``."""
    if not (builder.PACKAGE / builder.extension_name()).exists():
        pytest.skip("not built in place")
    assert form_in_a_process(ROOT / "src") == builder.source_hash()


@pytest.mark.parametrize(
    ("compiler", "text"),
    [
        ("/nowhere/cc", "the C compiler '/nowhere/cc' cannot be run: No such file"),
        ("false", "the C compiler failed"),
    ],
)
def test_without_a_compiler_the_build_says_so(tmp_path, monkeypatch, compiler, text):
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(builder.CannotBuild, match=text):
        builder.build(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_headers_the_build_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(builder.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(builder.CannotBuild, match=r"Python\.h does not exist"):
        builder.build(tmp_path)


def test_the_build_script_ends_well_without_a_compiler():
    done = subprocess.run(
        [sys.executable, str(ROOT / "native" / "build.py")],
        env={**os.environ, "CC": "/nowhere/cc"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.startswith(
        "penstock._native is not built, so tuples are handled in pure Python: the C comp"
    )
    assert done.stderr.count("\n") == 1
