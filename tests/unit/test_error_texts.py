"""The texts of errors: rules for every error in the source, and some complete messages."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock import BasicBolt, Spout, TopologyBuilder
from penstock.errors import PenstockError, TopologyError
from penstock.frames.header import unpack

SOURCE = Path(penstock.__file__).parent
NAMES = (
    "Apache",
    "Arrow",
    "Cassandra",
    "Debian",
    "HBase",
    "Java",
    "Kafka",
    "Maven",
    "MemoryQueue",
    "Penstock",
    "PostgreSQL",
    "Redis",
    "Spark",
)
"""Names with a capital letter that a problem may begin with."""


def _classes(trees: list[ast.Module]) -> set[str]:
    """The names of all subclasses of PenstockError."""
    bases = {
        each.name: {getattr(base, "id", getattr(base, "attr", "")) for base in each.bases}
        for tree in trees
        for each in ast.walk(tree)
        if isinstance(each, ast.ClassDef)
    }
    found = {"PenstockError"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


def _sites() -> Iterator[tuple[str, ast.Call]]:
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    classes = _classes(list(trees.values()))
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in classes:
                yield f"{path.relative_to(SOURCE)}:{node.lineno}", node


def _texts(node: ast.expr) -> Iterator[tuple[str, str]]:
    """The beginning and the end of each text that an expression can produce. A value in braces is "{}"."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value, node.value
    elif isinstance(node, ast.JoinedStr):
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        yield text, text
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body)
        yield from _texts(node.orelse)
    elif isinstance(node, ast.BinOp):
        begins = [begin for begin, _ in _texts(node.left)] or ["{}"]
        ends = [end for _, end in _texts(node.right)] or ["{}"]
        yield from ((begin, end) for begin in begins for end in ends)


SITES = [site for site in _sites() if not any(isinstance(part, ast.Starred) for part in site[1].args)]


def test_the_walk_finds_the_errors() -> None:
    assert len(SITES) > 300


def test_every_error_has_two_or_three_parts() -> None:
    assert [where for where, call in SITES if call.keywords or len(call.args) not in (2, 3)] == []


def test_a_problem_is_a_clause() -> None:
    """It begins with a small letter, a value or a name, and has no full stop, because that is added."""
    wrong = []
    for where, call in SITES:
        for begin, end in _texts(call.args[1]):
            good = begin.startswith((*NAMES, "{", "'", '"')) or begin[:1].islower() or begin[:1].isdigit()
            if not good or end.endswith((".", ";", ":", " ")) or "; got" in begin:
                wrong.append(f"{where}: {begin}")
    assert wrong == []


def test_a_hint_is_a_sentence() -> None:
    wrong = []
    for where, call in SITES:
        for begin, end in _texts(call.args[2]) if len(call.args) == 3 else ():
            good = begin[:1].isupper() or begin[:1].isdigit() or begin.startswith(("{", "penstock "))
            if (begin and not good) or (end and not end.endswith((".", "?", "!", "…", "{}"))):
                wrong.append(f"{where}: {begin}")
    assert wrong == []


# ---- read aloud ----------------------------------------------------------------------------------------


class Lines(Spout):
    def declare_output_fields(self, declarer):
        declarer.declare("line")

    def next_tuple(self):
        pass


class Count(BasicBolt):
    def declare_output_fields(self, declarer):
        declarer.declare("word", "count")

    def execute(self, tup, collector):
        pass


def _misspelt_component(builder: TopologyBuilder) -> None:
    builder.set_bolt("count", Count()).shuffle_grouping("lnies")


def _misspelt_field(builder: TopologyBuilder) -> None:
    builder.set_bolt("count", Count()).fields_grouping("lines", "lien")


def _undeclared_stream(builder: TopologyBuilder) -> None:
    builder.set_bolt("count", Count()).shuffle_grouping("lines", stream="errors")


def _twice(builder: TopologyBuilder) -> None:
    builder.set_bolt("count", Count()).shuffle_grouping("lines").shuffle_grouping("lines")


def _without_input(builder: TopologyBuilder) -> None:
    builder.set_bolt("count", Count())


def _wrong_parallelism(builder: TopologyBuilder) -> None:
    builder.set_bolt("count", Count(), 0)


def _class_instead_of_instance(builder: TopologyBuilder) -> None:
    builder.set_bolt("count", Count)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        (_misspelt_component, "it reads from 'lnies', which does not exist. Did you mean 'lines'?"),
        (
            _misspelt_field,
            "fields grouping names field 'lien', which stream 'lines' does not have. Did you mean 'line'?",
        ),
        (
            _undeclared_stream,
            "it reads stream 'errors' of 'lines', which declares only default. Declare it in"
            " Lines.declare_output_fields, or subscribe with stream='default'.",
        ),
        (_twice, "it subscribes twice to stream 'default' of 'lines'. Drop one of the two groupings."),
        (
            _without_input,
            "no spout reaches this bolt: it subscribes to nothing. Give it a grouping on a component that is fed,"
            " or remove it.",
        ),
        (_wrong_parallelism, "parallelism must be a whole number of at least 1, not 0."),
        (
            _class_instead_of_instance,
            "set_bolt takes an instance of a bolt class, not the class Count. Pass Count(), with brackets.",
        ),
    ],
)
def test_mistakes_in_a_topology(mistake, text) -> None:
    builder = TopologyBuilder()
    builder.set_spout("lines", Lines())

    def build() -> None:
        mistake(builder)
        builder.build("wc")

    with pytest.raises(TopologyError) as caught:
        build()
    where, _, said = str(caught.value).partition("): ")
    assert where.startswith("component 'count'")
    assert "(test_error_texts.py:" in where
    assert said == text


def test_bytes_that_are_no_frame() -> None:
    with pytest.raises(PenstockError) as caught:
        unpack(b"abc")
    assert str(caught.value).startswith("frame: it has 3 bytes, less than a header of ")
