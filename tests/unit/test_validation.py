"""Invalid topologies are rejected when they are built; every test checks the message."""

import inspect
import threading

import pyarrow as pa
import pytest

from penstock import (
    BasicBolt,
    BatchBolt,
    CustomGrouping,
    DedupBolt,
    Reduce,
    RichBolt,
    Settings,
    Spout,
    TopologyBuilder,
    TopologyError,
)
from penstock.aggregates import Count
from penstock.testing import CaptureBolt, FeederSpout, LocalRunner
from penstock.topology.groupings import Fields, Shuffle
from tests.helpers import Pass

FILE = "test_validation.py"


class TwoStreams(Spout):
    def declare_output_fields(self, declarer):
        declarer.declare("error", stream="errors")
        declarer.declare("word", "count", stream="words")

    def next_tuple(self):
        pass


class DirectSpout(Spout):
    def declare_output_fields(self, declarer):
        declarer.declare("word", direct=True)

    def next_tuple(self):
        pass


class OwnFields(Fields):
    """A user's grouping, which may route in any way."""


class Declares(Spout):
    """A spout with the declaration of the test."""

    def __init__(self, declare):
        self._declare = declare

    def declare_output_fields(self, declarer):
        self._declare(declarer)

    def next_tuple(self):
        pass


def words():
    builder = TopologyBuilder()
    builder.set_spout("words", FeederSpout("word", "count"))
    return builder


def line():
    """The line of the test that calls this, in the form of the messages."""
    return f"{FILE}:{inspect.currentframe().f_back.f_lineno}"


def message(builder, name="t"):
    with pytest.raises(TopologyError) as caught:
        builder.build(name)
    return str(caught.value)


def holds(text, *parts):
    for part in parts:
        assert part in text, f"{part!r} is missing in: {text}"


# ---- the builder's own checks, at the call ---------------------------------------------------------------


def refused(call):
    with pytest.raises(TopologyError) as caught:
        call()
    return str(caught.value)


def test_a_second_component_of_one_id_names_both_lines():
    builder = TopologyBuilder()
    builder.set_spout("words", FeederSpout("word"))
    first = line().rsplit(":", 1)[1]
    text = refused(lambda: builder.set_bolt("words", CaptureBolt()))
    holds(
        text,
        "component 'words'",
        "there is another component 'words'",
        f"{FILE}:{int(first) - 1}",
        "Rename one of the two",
    )


@pytest.mark.parametrize("parallelism", [0, -3, 1.5, "2", None])
def test_parallelism_is_at_least_one(parallelism):
    text = refused(lambda: words().set_bolt("count", CaptureBolt(), parallelism))
    holds(text, "component 'count'", f"({FILE}:", "at least 1", f"not {parallelism!r}")


@pytest.mark.parametrize("tasks", [3, 0, 4.5, None])
def test_tasks_are_at_least_the_parallelism(tasks):
    declarer = words().set_bolt("count", CaptureBolt(), 4)
    text = refused(lambda: declarer.set_num_tasks(tasks))
    holds(
        text, "component 'count'", f"({FILE}:", "at least the parallelism, 4", repr(tasks), "Raise set_num_tasks"
    )


def test_spouts_count_their_tasks_too():
    declarer = TopologyBuilder().set_spout("words", FeederSpout("word"), 2)
    holds(refused(lambda: declarer.set_num_tasks(1)), "component 'words'", "at least the parallelism, 2, not 1")


def test_a_class_instead_of_an_instance():
    text = refused(lambda: words().set_bolt("count", CaptureBolt))
    holds(text, "component 'count'", f"({FILE}:", "instance of a bolt", "the class CaptureBolt", "CaptureBolt()")


def test_a_spout_class_instead_of_an_instance():
    text = refused(lambda: TopologyBuilder().set_spout("words", TwoStreams))
    holds(text, "component 'words'", "instance of a spout", "the class TwoStreams", "Pass TwoStreams()")


def test_a_spout_in_set_bolt():
    text = refused(lambda: words().set_bolt("more", FeederSpout("word")))
    holds(
        text,
        "component 'more'",
        f"({FILE}:",
        "set_bolt takes an instance of a bolt",
        "FeederSpout",
        "Use set_spout",
    )


def test_a_bolt_in_set_spout():
    text = refused(lambda: TopologyBuilder().set_spout("words", CaptureBolt()))
    holds(text, "component 'words'", "set_spout takes an instance of a spout", "CaptureBolt", "Use set_bolt")


def test_something_else_in_set_bolt():
    text = refused(lambda: words().set_bolt("count", print))
    holds(text, "component 'count'", "instance of a bolt", "print", "Derive it from", "BasicBolt")


@pytest.mark.parametrize("id", ["", "__acker", "a:b", None, 7])
def test_ids_are_plain_names(id):
    text = refused(lambda: TopologyBuilder().set_spout(id, FeederSpout("word")))
    holds(text, f"({FILE}:", f"{id!r} cannot be the id of a component, which is a printable text")


def test_grouping_takes_a_grouping():
    declarer = words().set_bolt("count", CaptureBolt())
    text = refused(lambda: declarer.grouping("words", Shuffle))
    holds(text, "component 'count'", f"({FILE}:", "takes a Grouping object", "Shuffle", "fields_grouping(")


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_tick_interval_is_positive(seconds):
    declarer = words().set_bolt("count", CaptureBolt())
    text = refused(lambda: declarer.set_tick_interval(seconds))
    holds(text, "component 'count'", f"({FILE}:", "greater than 0 s", repr(seconds))


@pytest.mark.parametrize("seconds", [-1.0, 0, "1"])
def test_the_tick_interval_of_a_class_is_checked_like_a_set_one(seconds):
    class Ticking(CaptureBolt):
        tick_interval = seconds

    def build():
        builder = words()
        builder.set_bolt("count", Ticking()).shuffle_grouping("words")
        builder.build("t")

    holds(refused(build), "component 'count'", "tick interval", repr(seconds))


# ---- the whole -------------------------------------------------------------------------------------------


def test_a_topology_needs_a_name():
    holds(message(words(), name=""), "a topology needs a name", "''")


def test_no_component_at_all():
    holds(message(TopologyBuilder(), "shop"), "topology 'shop'", "it has no components", "set_spout")


def test_no_spout():
    builder = TopologyBuilder()
    builder.set_bolt("a", Pass("x")).shuffle_grouping("b")
    builder.set_bolt("b", Pass("x")).shuffle_grouping("a")
    holds(message(builder, "shop"), "topology 'shop'", "it has no spout", "set_spout")


def test_an_unknown_component_with_a_near_name():
    builder = words()
    declarer = builder.set_bolt("count", CaptureBolt())
    declarer.shuffle_grouping("wrods")
    at = int(line().rsplit(":", 1)[1]) - 1
    holds(
        message(builder),
        f"component 'count' ({FILE}:{at})",
        "it reads from 'wrods', which does not exist",
        "Did you mean 'words'?",
    )


def test_an_unknown_component_with_no_near_name():
    builder = words()
    builder.set_bolt("count", CaptureBolt()).shuffle_grouping("xyzzy")
    holds(
        message(builder),
        "component 'count'",
        "it reads from 'xyzzy', which does not exist",
        "The components are: words, count.",
    )


def test_an_unknown_stream_names_the_declared_ones():
    builder = words()
    builder.set_bolt("count", CaptureBolt()).shuffle_grouping("words", stream="late")
    text = message(builder)
    holds(text, f"component 'count' ({FILE}:", "stream 'late' of 'words', which declares only default")
    holds(text, "FeederSpout.declare_output_fields", "stream='default'")


def test_an_unknown_stream_suggests_the_nearest_one():
    builder = TopologyBuilder()
    builder.set_spout("source", TwoStreams())
    builder.set_bolt("count", CaptureBolt()).shuffle_grouping("source", stream="wrods")
    text = message(builder)
    holds(text, "component 'count'", "stream 'wrods' of 'source'", "errors, words")
    assert "'words'" in text.split("errors, words")[1], text


def test_a_component_that_declares_nothing_has_no_stream():
    builder = words()
    builder.set_bolt("sink", CaptureBolt()).shuffle_grouping("words")
    builder.set_bolt("after", CaptureBolt()).shuffle_grouping("sink")
    holds(message(builder), "component 'after'", "stream 'default' of 'sink', which declares no stream")


@pytest.mark.parametrize("method", ["fields_grouping", "partial_key_grouping"])
class TestKeyFields:
    def test_unknown(self, method):
        builder = words()
        getattr(builder.set_bolt("count", CaptureBolt()), method)("words", "wrod")
        name = method.removesuffix("_grouping")
        text = message(builder)
        holds(
            text,
            f"component 'count' ({FILE}:",
            f"{name} grouping names field 'wrod', which stream 'words' does not have",
        )
        holds(text, "Did you mean 'word'?")

    def test_unknown_and_nothing_near(self, method):
        builder = words()
        getattr(builder.set_bolt("count", CaptureBolt()), method)("words", "word", "zzz")
        holds(message(builder), "component 'count'", "names field 'zzz'", "The fields are: word, count.")

    def test_missing(self, method):
        builder = words()
        getattr(builder.set_bolt("count", CaptureBolt()), method)("words")
        text = message(builder)
        holds(text, f"component 'count' ({FILE}:", "needs at least one field", "Name one of word, count")


def test_a_custom_grouping_s_fields_are_checked():
    class ByWord(CustomGrouping):
        def key_fields(self):
            return ("wird",)

        def choose(self, values):
            return []

    builder = words()
    builder.set_bolt("count", CaptureBolt()).grouping("words", ByWord())
    holds(message(builder), "component 'count'", "custom grouping names field", "'wird'", "Did you mean 'word'?")


def test_direct_grouping_on_a_plain_stream():
    builder = words()
    builder.set_bolt("count", CaptureBolt()).direct_grouping("words")
    text = message(builder)
    holds(text, f"component 'count' ({FILE}:", "direct grouping needs a direct stream", "'words'", "direct=True")


def test_another_grouping_on_a_direct_stream():
    builder = TopologyBuilder()
    builder.set_spout("words", DirectSpout())
    builder.set_bolt("count", CaptureBolt()).shuffle_grouping("words")
    text = message(builder)
    holds(
        text, f"component 'count' ({FILE}:", "stream 'words' is direct", "only, not shuffle", "Use direct_grouping"
    )


def test_a_bolt_that_reads_nothing():
    builder = words()
    builder.set_bolt("island", CaptureBolt())
    text = message(builder)
    holds(text, f"component 'island' ({FILE}:", "no spout reaches this bolt: it subscribes to nothing")
    holds(text, "Give it a grouping on a component that is fed")


def test_bolts_that_only_feed_each_other():
    builder = words()
    builder.set_bolt("a", Pass("x")).shuffle_grouping("b")
    builder.set_bolt("b", Pass("x")).shuffle_grouping("a")
    holds(message(builder), "component 'a'", "no spout reaches this bolt", "its inputs are b", "remove it")


def test_a_cycle_is_written_out():
    builder = words()
    builder.set_bolt("a", Pass("x")).shuffle_grouping("words").shuffle_grouping("c")
    builder.set_bolt("b", Pass("x")).shuffle_grouping("a")
    builder.set_bolt("c", Pass("x")).shuffle_grouping("b")
    text = message(builder)
    holds(
        text,
        f"component 'a' ({FILE}:",
        "the groupings form a cycle, a -> b -> c -> a",
        "Remove one of these groupings",
    )


def test_a_bolt_that_reads_itself():
    builder = words()
    builder.set_bolt("a", Pass("x")).shuffle_grouping("words").shuffle_grouping("a")
    holds(message(builder), "component 'a'", "the groupings form a cycle, a -> a", "a queue that a spout reads")


def test_a_diamond_is_no_cycle():
    builder = words()
    builder.set_bolt("a", Pass("x")).shuffle_grouping("words")
    builder.set_bolt("b", Pass("x")).shuffle_grouping("words")
    builder.set_bolt("c", CaptureBolt()).shuffle_grouping("a").shuffle_grouping("b")
    assert list(builder.build("t").nodes) == ["words", "a", "b", "c"]


def test_the_same_stream_twice():
    builder = words()
    declarer = builder.set_bolt("count", CaptureBolt()).shuffle_grouping("words")
    declarer.fields_grouping("words", "word")
    text = message(builder)
    holds(text, f"component 'count' ({FILE}:", "subscribes twice", "stream 'default' of 'words'")
    holds(text, "Drop one of the two groupings")


def test_two_streams_of_one_component_are_fine():
    builder = TopologyBuilder()
    builder.set_spout("source", TwoStreams())
    bolt = builder.set_bolt("count", CaptureBolt())
    bolt.shuffle_grouping("source", stream="errors").shuffle_grouping("source", stream="words")
    assert len(builder.build("t").nodes["count"].inputs) == 2


# ---- declared streams ------------------------------------------------------------------------------------


def declared(declare):
    builder = TopologyBuilder()
    builder.set_spout("words", Declares(declare))
    return message(builder)


@pytest.mark.parametrize(
    "name", ["fields", "value", "source_component", "source_stream", "source_task", "is_tick"]
)
def test_reserved_field_names(name):
    text = declared(lambda declarer: declarer.declare("word", name))
    holds(text, "component 'words', stream 'default'", f"'{name}' is taken by Tuple", "Choose another name")


def test_field_names_of_python_s_own():
    holds(declared(lambda d: d.declare("__class__")), "component 'words'", "'__class__' is taken", "another name")


def test_the_names_of_tuple_methods_are_free():
    builder = TopologyBuilder()
    builder.set_spout("words", Declares(lambda d: d.declare("count", "index")))
    assert builder.build("t").stream("words", "default").field_names == ("count", "index")


def test_duplicate_field_names():
    text = declared(lambda d: d.declare("word", "n", "word", stream="s"))
    holds(text, "component 'words', stream 's'", "it has two fields", "fields 'word'", "Rename one")


def test_no_field():
    text = declared(lambda d: d.declare())
    holds(text, "component 'words', stream 'default'", "it has no field", 'declare("word", "count")')


def test_a_stream_declared_twice():
    def twice(declarer):
        declarer.declare("a", stream="s")
        declarer.declare("b", stream="s")

    holds(declared(twice), "component 'words', stream 's'", "declared twice", "Drop one")


@pytest.mark.parametrize("name", ["", 7, None, ["word", "count"]])
def test_field_names_are_texts(name):
    text = declared(lambda d: d.declare(name))
    holds(text, "component 'words'", "non-empty text", repr(name), "Give it a name")


@pytest.mark.parametrize("kind", [list, "int", 5, [int], {1: 2}])
def test_bad_field_types(kind):
    text = declared(lambda d: d.declare(("word", kind)))
    holds(text, "component 'words'", "type of field 'word'", "str, int, float, bool, bytes", "pyarrow type")
    holds(text, repr(kind), "Leave the type out")


def test_a_field_of_three_parts():
    holds(declared(lambda d: d.declare(("word", str, 3))), "component 'words'", "('word', <class 'str'>, 3)")


def test_good_types():
    builder = TopologyBuilder()
    builder.set_spout("words", Declares(lambda d: d.declare(("a", int), ("b", pa.int8()), "c", ("e", None))))
    types = [field.type for field in builder.build("t").stream("words", "default").fields]
    assert types == [pa.int64(), pa.int8(), None, None]


# ---- travel ----------------------------------------------------------------------------------------------


class HoldsLock(BasicBolt):
    def __init__(self):
        self._lock = threading.Lock()

    def execute(self, tup, collector):
        pass


def test_an_unpicklable_component():
    builder = words()
    builder.set_bolt("locked", HoldsLock()).shuffle_grouping("words")
    topology = builder.build("t", Settings())
    with pytest.raises(TopologyError) as caught:
        LocalRunner(topology)
    holds(str(caught.value), "component 'locked'", "cannot be pickled", "TypeError", "lock", "prepare()")


def test_partials_of_one_key_must_meet_in_one_task():
    counts = Reduce("word", count=Count())

    def merged_by(group):
        builder = TopologyBuilder()
        builder.set_spout("words", FeederSpout("word"))
        builder.set_bolt("count", counts.partials(), 3).shuffle_grouping("words")
        group(builder.set_bolt("total", counts.merged(), 2))
        return builder.build("parts")

    with pytest.raises(TopologyError, match=r"'total'.*of a key must reach one task.*shuffle.*fields_grouping"):
        merged_by(lambda total: total.shuffle_grouping("count"))
    with pytest.raises(TopologyError, match="partial_key"):
        merged_by(lambda total: total.partial_key_grouping("count", "word"))
    merged_by(lambda total: total.fields_grouping("count", "word"))
    merged_by(lambda total: total.global_grouping("count"))


@pytest.mark.parametrize(
    ("group", "tasks", "got"),
    [
        (lambda once: once.fields_grouping("words", "word", "count"), 2, ""),
        (lambda once: once.fields_grouping("words", "word"), 2, ""),
        (lambda once: once.global_grouping("words"), 2, ""),
        (lambda once: once.shuffle_grouping("words"), 1, ""),
        (lambda once: once.shuffle_grouping("words"), 2, "shuffle grouping on 'words'"),
        (lambda once: once.partial_key_grouping("words", "word"), 2, "partial_key(word) grouping on 'words'"),
        (lambda once: once.fields_grouping("words", "note"), 2, "fields(note) grouping on 'words'"),
        (lambda once: once.grouping("words", OwnFields("word")), 2, "fields(word) grouping on 'words'"),
        (
            lambda once: once.fields_grouping("words", "word").fields_grouping("more", "word"),
            2,
            "",
        ),
        (
            lambda once: once.fields_grouping("words", "word").fields_grouping("more", "count"),
            2,
            "fields(count) grouping on 'more' beside fields(word) grouping on another input does not ensure",
        ),
    ],
)
def test_tuples_that_are_compared_must_meet_in_one_task(group, tasks, got):
    builder = TopologyBuilder()
    builder.set_spout("words", FeederSpout("word", "count", "note"))
    builder.set_spout("more", FeederSpout("word", "count", "note"))
    group(builder.set_bolt("once", DedupBolt("word", "count", "note", by=["word", "count"]), tasks))
    if not got:
        builder.build("t")
        return
    text = message(builder)
    holds(text, "component 'once'", f"({FILE}:", "agree in word, count must reach one of its 2 tasks", got)
    holds(text, "'word', 'count') for every input, or one task")


BAD_NAMES = [
    "..",
    ".hidden",
    "a/b",
    "a\\b",
    "a\nb",
    "a\x1b[2J",
    "x" * 101,
    "ä" * 51,
    " a",
    "a ",
    "\ud800",
    "a\u202eb",
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=range(len(BAD_NAMES)))
def test_names_that_cannot_be_part_of_a_path_are_rejected(name):
    """They become parts of paths, topics, metrics and terminal output."""

    def of_component():
        TopologyBuilder().set_spout(name, FeederSpout("word"))

    def of_topology():
        builder = TopologyBuilder()
        builder.set_spout("words", FeederSpout("word"))
        builder.build(name)

    def of_stream():
        class Named(FeederSpout):
            def declare_output_fields(self, declarer):
                declarer.declare("word", stream=name)

        builder = TopologyBuilder()
        builder.set_spout("words", Named("word"))
        builder.build("t")

    for make, what in (
        (of_component, "the id of a component"),
        (of_topology, "the name of a topology"),
        (of_stream, "a stream's id"),
    ):
        with pytest.raises(TopologyError) as error:
            make()
        assert f"cannot be {what}, which is a printable text of 1 to 100 bytes" in str(error.value)
        assert str(error.value).isprintable()
        assert len(str(error.value)) < 500


@pytest.mark.parametrize("name", ["word-count", "Zähler 2", "a.b_c", "x" * 100])
def test_other_names_are_fine(name):
    builder = TopologyBuilder()
    builder.set_spout(name, FeederSpout("word"))
    assert builder.build(name).name == name


class Yields(Spout):
    def declare_output_fields(self, declarer):
        declarer.declare("n")

    def next_tuple(self):
        yield 1


class Awaits(BasicBolt):
    async def execute(self, tup, collector):
        collector.emit(tup)


class YieldsBatches(BatchBolt):
    def execute_batch(self, batch, source, collector):
        yield batch


class OpensLater(RichBolt):
    async def prepare(self, conf, context, collector):
        pass

    def execute(self, tup):
        pass


@pytest.mark.parametrize(
    ("component", "text"),
    [
        (
            Yields(),
            "Yields.next_tuple must be a plain function that does its work when it is called, not a generator",
        ),
        (
            Awaits(),
            "Awaits.execute must be a plain function that does its work when it is called, not a coroutine",
        ),
        (YieldsBatches(), "YieldsBatches.execute_batch must be a plain function .* not a generator function"),
        (OpensLater(), "OpensLater.prepare must be a plain function .* not a coroutine function"),
    ],
    ids=["generator", "coroutine", "batches", "prepare"],
)
def test_a_generator_function_emits_nothing(component, text):
    builder = TopologyBuilder()
    if isinstance(component, Spout):
        builder.set_spout("words", component)
    else:
        builder.set_spout("words", FeederSpout("n"))
        builder.set_bolt("bolt", component).shuffle_grouping("words")
    with pytest.raises(TopologyError, match=text):
        builder.build("t")


class NoCollector(BasicBolt):
    def execute(self, tup):
        pass


class NoSelf(BasicBolt):
    def execute(tup, collector):  # noqa: N805 - the mistake that is tested
        pass


class TwoMore(BasicBolt):
    def execute(self, tup, collector, extra, *, more):
        pass


class PreparesWithout(RichBolt):
    def prepare(self, conf, context):
        pass

    def execute(self, tup):
        pass


class NextOfWhat(Spout):
    def next_tuple(self, collector):
        pass


class OnInstance(BasicBolt):
    """Its method is an attribute of the instance."""

    def __init__(self, function):
        self.execute = function

    execute = None


class OpensAlone(Spout):
    def open(self):
        pass

    def next_tuple(self):
        pass


@pytest.mark.parametrize(
    ("component", "text"),
    [
        (
            NoCollector(),
            "NoCollector.execute must be declared as execute(self, tup, collector), not as execute(self, tup) "
            "(test_validation.py:LINE). Change its parameters, or derive the class from RichBolt.",
        ),
        (NoSelf(), "execute(self, tup, collector), not as execute(tup, collector) (test_validation.py:LINE)."),
        (
            TwoMore(),
            "not as execute(self, tup, collector, extra, *, more) (test_validation.py:LINE). Change its param",
        ),
        (
            PreparesWithout(),
            "as prepare(self, conf, context, collector), not as prepare(self, conf, context) (test",
        ),
        (NextOfWhat(), "as next_tuple(self), not as next_tuple(self, collector) (test_validation.py:LINE)"),
        (
            OnInstance(lambda tup: None),
            "as execute(self, tup, collector), not as execute(tup) (test_validation.py:",
        ),
        (OpensAlone(), "as open(self, conf, context, collector), not as open(self) (test_validation.py:LINE)"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_method_with_other_parameters_is_rejected(component, text):
    builder = TopologyBuilder()
    if isinstance(component, Spout):
        builder.set_spout("part", component)
    else:
        builder.set_spout("words", FeederSpout("n"))
        builder.set_bolt("part", component).shuffle_grouping("words")
    with pytest.raises(TopologyError) as error:
        builder.build("t")
    name = error.value.problem.split(".")[1].split()[0]
    line = inspect.getsourcelines(getattr(component, name))[1]
    assert text.replace("LINE", str(line)) in str(error.value)
    assert error.value.where.startswith("component 'part' (test_validation.py:")


class Anything(BasicBolt):
    def prepare(self, *arguments):
        pass

    def execute(self, tup, collector=None, also=None):
        pass


@pytest.mark.parametrize(
    "component", [Anything(), OnInstance(lambda tup, collector: None)], ids=lambda value: type(value).__name__
)
def test_a_method_that_takes_more_is_fine(component):
    builder = TopologyBuilder()
    builder.set_spout("words", FeederSpout("n"))
    builder.set_bolt("part", component).shuffle_grouping("words")
    builder.build("t")


def test_settings_of_another_type_are_rejected():
    builder = TopologyBuilder()
    builder.set_spout("words", FeederSpout("word"))
    text = r"topology 'wc' \(test_validation.py:\d+\): its settings are a dict, not a Settings\. Write Settings\("
    with pytest.raises(TopologyError, match=text):
        builder.build("wc", {"delivery": "exactly_once"})
