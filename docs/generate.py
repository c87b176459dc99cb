"""An MkDocs hook that writes pages from the code, so that they cannot become outdated.

- ``reference/settings.md`` from the fields of ``Settings`` and its groups;
- ``reference/cli.md`` from the parsers of the ``penstock`` command;
- ``decisions/index.md`` from the titles of the decision records, which also enter the navigation;
- ``reference/api/*.md`` from the ``__all__`` of the documented packages;
- ``ARCHITECTURE.md``, ``CONTRIBUTING.md`` and ``CHANGELOG.md`` from the files in the project's root.

MkDocs calls ``on_config`` and then ``on_files`` once per build. The pages are in memory only.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
PACKAGES = {
    "penstock": "reference/api/penstock.md",
    "penstock.aggregates": "reference/api/aggregates.md",
    "penstock.bolts": "reference/api/bolts.md",
    "penstock.connectors": "reference/api/connectors.md",
    "penstock.control": "reference/api/control.md",
    "penstock.persist": "reference/api/persist.md",
    "penstock.replay": "reference/api/replay.md",
    "penstock.sim": "reference/api/sim.md",
    "penstock.testing": "reference/api/testing.md",
    "penstock.testing.servers": "reference/api/servers.md",
}
# Where a public name of ``penstock`` is defined decides about its heading; the longest prefix counts.
SECTIONS = {
    "penstock.topology": "Topologies and components",
    "penstock.topology.groupings": "Groupings",
    "penstock.bolts": "Ready-made bolts",
    "penstock.aggregates": "Aggregates",
    "penstock.settings": "Settings",
    "penstock.state": "State",
    "penstock.plan": "Plans",
    "penstock.driver": "Running topologies",
    "penstock.spark": "Running topologies",
    "penstock.clock": "Clocks",
    "penstock.errors": "Errors",
    "penstock": "Other names",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every decision record into the navigation, under the heading that has their overview."""
    records = [f"decisions/{path.name}" for path in decision_records()]

    def fill(entries: list[Any]) -> None:
        for entry in entries:
            for below in entry.values() if isinstance(entry, dict) else ():
                if below == ["decisions/index.md"]:
                    below.extend(records)
                elif isinstance(below, list):
                    fill(below)

    fill(config.nav or [])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those that are in ``docs``."""
    for path, text in pages():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> Iterator[tuple[str, str]]:
    """Each generated page as ⟨path below docs, Markdown⟩."""
    yield "reference/settings.md", settings_page()
    yield "reference/cli.md", cli_page()
    for package, path in PACKAGES.items():
        yield path, api_page(importlib.import_module(package))
    yield "decisions/index.md", decisions_page()
    for name in ROOT_PAGES:
        yield name, root_page((ROOT / name).read_text())


# ---- settings ------------------------------------------------------------------------------------------------


def settings_page() -> str:
    """One table for each group of settings, and one for those at the top level."""
    from penstock import Settings

    lines = [
        "# Settings",
        "",
        "Give a setting on the command line, `penstock run FILE --set flow.load_factor=0.7`, or in Python,"
        " `builder.build(name, Settings(flow=Flow(load_factor=0.7)))`. The first setting of a group may be given"
        ' by position, `Delivery("exactly_once")`, and on the command line by the group\'s name alone:'
        " `--set delivery=exactly_once`.",
        "",
        "This page is generated from the code.",
    ]
    single = []
    for field in dataclasses.fields(Settings):
        default = _default(field)
        if not dataclasses.is_dataclass(default):
            single.append((field, field.name))
            continue
        about = (type(default).__doc__ or "").split("\n\n")[0]
        lines += ["", f"## {field.name}", "", " ".join(about.split()), "", *_TABLE]
        lines += [_row(each, f"{field.name}.{each.name}") for each in dataclasses.fields(default)]
    lines += ["", "## Top level", "", *_TABLE, *(_row(field, name) for field, name in single)]
    return "\n".join(lines) + "\n"


_TABLE = ["| setting | default | unit | meaning |", "|---|---|---|---|"]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    raise ValueError(f"setting {field.name} has no default")


def _row(field: dataclasses.Field[Any], name: str) -> str:
    default, meta = _default(field), field.metadata
    shown = str(default).lower() if isinstance(default, bool) else str(default)
    choices = ", ".join(f"`{choice}`" for choice in meta.get("choices", ()))
    meaning = _cell(meta.get("why", "")) + (f". One of {choices}" if choices else "")
    return f"| `{name}` | {f'`{shown}`' if shown not in ('', '{}') else ''} | {meta.get('unit', '')} | {meaning} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# ---- commands ------------------------------------------------------------------------------------------------


def cli_page() -> str:
    """A section for each command, in the order of ``penstock --help``."""
    from penstock.cli.main import make_parser

    parser = make_parser()
    lines = ["# Commands", "", _sentence(parser.description), "", "This page is generated from the code.", ""]
    lines += [f"{_sentence(parser.epilog)} [Exit codes](exit-codes.md) explains them.", ""]
    for name, about, command in _commands(parser):
        lines += _command(f"penstock {name}", about, command, 2)
    return "\n".join(lines) + "\n"


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, command in action.choices.items():
                yield name, helps.get(name, ""), command


def _command(name: str, about: str, parser: argparse.ArgumentParser, level: int) -> list[str]:
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    lines = [f"{'#' * level} {name}", "", _sentence(parser.description or about), "", "```", usage, "```", ""]
    rows = [
        f"| {_option(action)} | {_cell(_expand(action, parser))} |"
        for action in parser._actions
        if action.help is not argparse.SUPPRESS
        and not isinstance(action, argparse._SubParsersAction | argparse._HelpAction)
    ]
    if rows:
        lines += ["| argument | meaning |", "|---|---|", *rows, ""]
    if parser.epilog:
        lines += [parser.epilog, ""]
    for sub, help_text, command in _commands(parser):
        lines += _command(f"{name} {sub}", help_text, command, level + 1)
    return lines


def _option(action: argparse.Action) -> str:
    choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices else ""
    value = action.metavar or choices or action.dest.upper()
    value = " ".join(value) if isinstance(value, tuple) else value
    if not action.option_strings:
        return f"`{value}`"
    shown = ", ".join(f"`{option}`" for option in action.option_strings)
    return shown if action.nargs == 0 else f"{shown} `{value}`"


def _expand(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    values = {**vars(action), "prog": parser.prog}
    return (action.help or "") % values


def _sentence(text: str | None) -> str:
    text = " ".join((text or "").split())
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", ":")) or not text else ".")


# ---- API -----------------------------------------------------------------------------------------------------


def api_page(package: ModuleType) -> str:
    """A page of one package: what it exports, by section where it is ``penstock`` itself."""
    about = (package.__doc__ or "").strip().split("\n\n")[0]
    lines = [f"# {package.__name__}", "", " ".join(about.split()), "", "This page is generated from the code.", ""]
    sections: dict[str, list[str]] = {}
    for name in package.__all__:
        sections.setdefault(_section(package, name), []).append(name)
    order = list(SECTIONS.values())
    for section in sorted(sections, key=order.index):
        if len(sections) > 1:
            lines += [f"## {section}", ""]
        lines += [f"::: {package.__name__}.{name}\n" for name in sections[section]]
    return "\n".join(lines) + "\n"


def _section(package: ModuleType, name: str) -> str:
    module = getattr(getattr(package, name), "__module__", package.__name__)
    prefixes = [prefix for prefix in SECTIONS if f"{module}.".startswith(f"{prefix}.")]
    return SECTIONS[max(prefixes, key=len, default="penstock")]


# ---- decisions -----------------------------------------------------------------------------------------------


def decision_records() -> list[Path]:
    """In order of their numbers."""
    return sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))


def decisions_page() -> str:
    """A list of the records by their titles."""
    lines = [
        "# Decisions",
        "",
        "Why Penstock is built as it is: each record has a question, a decision and its consequences.",
        "",
    ]
    for path in decision_records():
        number, _, title = path.read_text().partition("\n")[0].removeprefix("# ").partition(". ")
        lines.append(f"{number}. [{title}]({path.name})")
    return "\n".join(lines) + "\n"


# ---- pages of the project's root -----------------------------------------------------------------------------


def root_page(text: str) -> str:
    """The text with its links as seen from ``docs``. Links to files that are not on the site become plain text."""
    text = re.sub(r"\]\(docs/", "](", text)
    on_site = "|".join(re.escape(name) for name in ROOT_PAGES)
    kinds = r"tutorial/|how-to/|concepts/|reference/|results/|decisions/|figures/|index\.md"
    return re.sub(rf"(?<!!)\[([^\]]+)\]\((?!https?:|#|{on_site}|{kinds})[^)]+\)", r"\1", text)
