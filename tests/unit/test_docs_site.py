"""What the pages say exists in the code: settings, commands, options, methods. ``make docs`` checks links."""

import argparse
import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest

from penstock import RunningTopology, Settings
from penstock.cli.main import make_parser
from penstock.driver.internals import Internals, PlacingInternals

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "penstock"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("**/*.md")])
MOST_WORDS = 35  # of the glossary
BEHIND = {
    "internals": Internals,
    "placing": PlacingInternals,
}  # attributes of a handle that have methods of their own
GROUPS = {
    field.name: {each.name: each for each in dataclasses.fields(field.default)}
    for field in dataclasses.fields(Settings)
    if dataclasses.is_dataclass(field.default)
}
# Words that the project no longer uses, and names of papers beside the project.
FORMER = re.compile(
    r"\b(seats?|lanes?|gates?|crew|memo|detours?|wish(es)?|rivals?|chain(ed|ing)|spare_seats|SlotDriver|"
    r"SPEC|DESIGN|STYLE|papers? [ABCD]|[ABCD]'s (algorithm|figure|cluster|network))\b"
)


def load_generator():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_generator()


def code(page):
    """Spans and lines of blocks that are code."""
    text = page.read_text()
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.S | re.M):
        yield from block.splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_that_are_named_exist(page):
    for span in code(page):
        named = re.findall(r"--set '?([a-z_]+)(?:\.([a-z_]+))?=", span)
        if page.parent.name != "results":  # names of benchmarks' figures look the same
            named += re.findall(rf"^({'|'.join(GROUPS)})\.([a-z_]+)(?:=\S*)?$", span)
        for group, name in named:
            if group == "conf":
                continue
            assert group in GROUPS or (group in Settings.__dataclass_fields__ and not name), span
            assert not name or name in GROUPS[group], span


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_defaults_in_brackets_are_those_of_the_settings(page):
    for name, text in re.findall(r"`([a-z_]+\.[a-z_]+)` \(([\d.,]*\d)(?:| s)\)", page.read_text()):
        group, _, field = name.partition(".")
        assert float(text.replace(",", "")) == GROUPS[group][field].default, name


def commands(parser, name="penstock"):
    """Each command with its parser, those below commands too."""
    found = {name: parser}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                found |= commands(below, f"{name} {word}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_that_are_named_exist(page):
    known = commands(make_parser())
    for span in code(page):
        for line in re.findall(r"(?:^|\s|/)(penstock (?!import)[a-z].*)", span.split("#")[0]):
            words = line.replace(",", " ").split()
            name = max((each for each in known if f"{' '.join(words)} ".startswith(f"{each} ")), key=len)
            assert name != "penstock", line
            if name.startswith("penstock bench"):
                continue  # takes the options of each benchmark
            options = {option for action in known[name]._actions for option in action.option_strings}
            assert set(re.findall(r"(?<!\S)(--[a-z-]+)", line)) <= options, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_called_on_a_handle_exists(page):
    for path in re.findall(r"\bhandle\.([a-z_.]*[a-z_])", page.read_text()):
        parts = path.split(".")
        owner = RunningTopology
        while len(parts) > 1 and parts[0] in BEHIND:
            owner = BEHIND[parts.pop(0)]
        assert parts[0] in BEHIND or hasattr(owner, parts[0]), path


def test_files_that_the_architecture_names_exist():
    named = set(
        re.findall(r"`([\w./-]+\.(?:py|toml|md))`|\]\(((?!https?:)[^)#]+)", (ROOT / "ARCHITECTURE.md").read_text())
    )
    paths = {code or link for code, link in named}
    assert len(paths) > 50
    assert sorted(path for path in paths if not any((base / path).exists() for base in (ROOT, PACKAGE))) == []


def test_the_glossary_is_short_and_sorted():
    rows = re.findall(r"^\| ([a-z ]+) \|", (DOCS / "reference" / "glossary.md").read_text(), re.M)[1:]
    assert rows == sorted(rows)
    assert 20 <= len(rows) <= MOST_WORDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_former_words_are_gone(page):
    assert [match[0] for match in FORMER.finditer(page.read_text())] == []


def test_generated_pages_have_every_setting_and_command():
    pages = dict(generate.pages())
    for group, names in GROUPS.items():
        for name in names:
            assert f"| `{group}.{name}` |" in pages["reference/settings.md"]
    for name in commands(make_parser()):
        assert name == "penstock" or f"# {name}\n" in pages["reference/cli.md"]


def test_every_setting_says_what_it_is_for():
    for group, fields in GROUPS.items():
        for name, field in fields.items():
            assert field.metadata.get("why"), f"{group}.{name}"
