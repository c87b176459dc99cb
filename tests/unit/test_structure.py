"""The shape of the source: one class per name, sizes that can be read, references that a reader can follow."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
ARCHITECTURE = ROOT / "ARCHITECTURE.md"

MOST_METHODS = 25
MOST_ATTRIBUTES = 20
MOST_FUNCTION_LINES = 60
MOST_MODULE_LINES = 450

# What is larger, by kind. ARCHITECTURE.md, "Larger than usual", names each and says why. An entry that is no
# longer needed fails ``test_every_exception_is_needed``: delete it here and there.
EXCEPTIONS: dict[str, set[str]] = {
    "methods": {
        "LocalRunner",
        "SinkExecutor",
    },
    "attributes": {
        "TopologyStatus",
        "TaskStats",
        "ZooKeeperMessageBoard",
        "SinkExecutor",
    },
    "function lines": set(),
    "module lines": set(),
}

LIMITS = {
    "methods": MOST_METHODS,
    "attributes": MOST_ATTRIBUTES,
    "function lines": MOST_FUNCTION_LINES,
    "module lines": MOST_MODULE_LINES,
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


TREES = _trees()


def _classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield path, node


def _methods(node: ast.ClassDef) -> list[Function]:
    """All functions of the class body, without the typed variants of an overloaded one."""
    return [
        each
        for each in node.body
        if isinstance(each, Function) and not any("overload" in ast.unparse(line) for line in each.decorator_list)
    ]


def _attributes(node: ast.ClassDef) -> set[str]:
    """The fields of a dataclass or struct, and what methods assign on ``self``."""
    found = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and "ClassVar" not in ast.unparse(each.annotation)
    }
    for method in _methods(node):
        for each in ast.walk(method):
            if (
                isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Store)
                and isinstance(each.value, ast.Name)
                and each.value.id == "self"
            ):
                found.add(each.attr)
    return found


def _name(path: Path) -> str:
    """A module's path below its package: ``worker/host.py``."""
    return path.relative_to(SOURCE).as_posix().removeprefix("penstock/")


def _sizes() -> Iterator[tuple[str, str, str, int]]:
    """⟨kind, name in the table of exceptions, place, size⟩ of all that has a limit."""
    for path, node in _classes():
        place = f"{_name(path)}:{node.lineno} {node.name}"
        yield "methods", node.name, place, len(_methods(node))
        yield "attributes", node.name, place, len(_attributes(node))
    for path, tree in TREES.items():
        yield "module lines", _name(path), _name(path), len(path.read_text().splitlines())
        for node in ast.walk(tree):
            if isinstance(node, Function):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                name = f"{path.stem}.{node.name}"
                yield "function lines", name, f"{_name(path)}:{node.lineno} {name}", lines


TOO_LARGE = [(kind, name, place, size) for kind, name, place, size in _sizes() if size > LIMITS[kind]]


def test_a_class_name_exists_once():
    """Private classes too: a reader who meets a name in a traceback or a log finds one class."""
    places = defaultdict(list)
    for path, node in _classes():
        places[node.name].append(f"{_name(path)}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


@pytest.mark.parametrize("kind", LIMITS)
def test_sizes_can_be_read(kind: str):
    found = [
        f"{place}: {size} {kind}, at most {LIMITS[kind]}"
        for what, name, place, size in TOO_LARGE
        if what == kind and name not in EXCEPTIONS[kind]
    ]
    assert found == []


@pytest.mark.parametrize("kind", LIMITS)
def test_every_exception_is_needed(kind: str):
    needed = {name for what, name, _, _ in TOO_LARGE if what == kind}
    assert sorted(EXCEPTIONS[kind] - needed) == [], "within the limit now, or gone: delete it from the table"


def test_every_exception_is_explained():
    text = ARCHITECTURE.read_text()
    assert "\n## Larger than usual\n" in text
    section = text.split("\n## Larger than usual\n")[1].split("\n## ")[0]
    table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    named = set(re.findall(r"`([^`]+)`", table))
    exceptions = set().union(*EXCEPTIONS.values())
    assert sorted(exceptions - named) == [], "not named in ARCHITECTURE.md"
    assert sorted(named - exceptions) == [], "named in ARCHITECTURE.md, but no exception"


# ---- references a reader can follow ----------------------------------------------------------------------

# The papers are cited by short names ("Lu 2020"), not by letters; "in C" means the language.
LETTERS = re.compile(
    r"\b[A-D] (?:§|eq\.|algorithm\b|(?:figure|table|definition)s? \d|\d+\.\d)"  # C eq. 13, A 6.2
    r"|\b[Pp]apers? [A-D]\b"
    r"|\b[A-D]'s (?!(?:\*\*)?(?:inbox|rate|own|send queue|overload detector))"  # D's formula, not a task's inbox
    r"|\b(?:choice of|as in|as) [A-D]\b(?=[\s.,;:])"
)
WORKING_PAPERS = re.compile(r"\bSPEC\b|\bDESIGN\b|\bSTYLE\.md\b|\bSPARK\.md\b")
NAMES_THEM = {"test_structure.py", "test_docs_site.py"}  # their patterns

# References that are still there, by folder. The numbers only go down; at 0 delete the entry.
STILL_THERE = {"src": 0, "docs": 0, "README.md": 0, "ARCHITECTURE.md": 0, "tests": 0}


def _texts(place: str) -> Iterator[Path]:
    if (ROOT / place).is_file():
        yield ROOT / place
    for pattern in ("*.py", "*.md"):
        for path in sorted((ROOT / place).rglob(pattern)):
            if path.name not in NAMES_THEM:
                yield path


@pytest.mark.parametrize("place", STILL_THERE)
def test_no_letters_of_papers_and_no_working_papers(place: str):
    found = []
    for path in _texts(place):
        name = path.relative_to(ROOT).as_posix()
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if LETTERS.search(line) or WORKING_PAPERS.search(line):
                found.append(f"{name}:{number}: {line.strip()}")
    assert len(found) <= STILL_THERE[place], "\n".join(found)
