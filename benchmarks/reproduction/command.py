"""The command ``penstock reproduce``."""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from benchmarks.harness import machine, say
from benchmarks.reproduction.model import Exhibit, Experiment
from benchmarks.reproduction.pictures import draw_all, picture_paths
from benchmarks.reproduction.registry import EXHIBITS, EXPERIMENTS
from benchmarks.reproduction.report import Findings, page
from benchmarks.reproduction.runner import ROOT, Work, duration, estimate, outstanding, run_all
from benchmarks.reproduction.store import Store
from penstock.errors import LoadError

RESULTS = ROOT / "results" / "reproduction"
DOCS = ROOT / "docs"
PAGE = "reproduction.md"
_FAILED = 4  # exit code: an experiment failed


def main(options: argparse.Namespace) -> int:
    """Run experiments, then write the page. The page is also written if the run is interrupted."""
    store = Store(Path(options.results) if options.results else RESULTS)
    docs = Path(options.docs) if options.docs else DOCS
    chosen = select(options.only)
    if options.list:
        print_list(store, chosen, options)
        return 0
    failed = []
    if not options.write_only:
        with store.locked():
            try:
                failed = _run(store, chosen, options)
            finally:
                write(store, docs)
    else:
        write(store, docs)
    if options.json:
        write_json(store, chosen, Path(options.json))
    for work in failed:
        say(f"failed: {work.experiment.id}, repeat {work.number}; the same command tries it again")
    return _FAILED if failed else 0


def select(patterns: Sequence[str] | None) -> list[Experiment]:
    """The experiments that a pattern names, by their own id or by the id of an exhibit; without patterns all."""
    if not patterns:
        return list(EXPERIMENTS.values())
    chosen: dict[str, Experiment] = {}
    for pattern in patterns:
        found = [id for id in EXPERIMENTS if fnmatch.fnmatchcase(id, pattern)]
        for exhibit in EXHIBITS:
            if fnmatch.fnmatchcase(exhibit.id, pattern):
                found += exhibit.experiments
        if not found:
            raise LoadError(
                f"penstock reproduce --only {pattern}",
                "no experiment, table or figure has this name, or nothing of it is measured",
                _hint(pattern),
            )
        chosen |= {id: EXPERIMENTS[id] for id in found}
    return [each for id, each in EXPERIMENTS.items() if id in chosen]


def _hint(pattern: str) -> str:
    names = [*EXPERIMENTS, *(exhibit.id for exhibit in EXHIBITS if exhibit.experiments)]
    near = difflib.get_close_matches(pattern, names, 1)
    return (f"Did you mean {near[0]}? " if near else "") + "'penstock reproduce --list' shows all."


def find(store: Store) -> Findings:
    """What is stored, for the page."""
    return Findings(EXHIBITS, EXPERIMENTS, {id: store.best(each) for id, each in EXPERIMENTS.items()})


def write(store: Store, docs: Path) -> None:
    """Write the page and its pictures from the stored results."""
    findings = find(store)
    docs.mkdir(parents=True, exist_ok=True)
    drawn = draw_all(findings, docs)
    (docs / PAGE).write_text(page(findings, picture_paths(findings)))
    say(f"written: {docs / PAGE} and {len(drawn)} picture{'' if len(drawn) == 1 else 's'}")


def write_json(store: Store, chosen: Sequence[Experiment], path: Path) -> None:
    """Machine, a row for each value, and the bars, for the chosen experiments."""
    findings = find(store)
    wanted = {each.id for each in chosen}
    rows, bars = [], []
    for exhibit in findings.measured:
        for each in findings.compared(exhibit):
            if each.value.experiment not in wanted:
                continue
            used = findings.repeats[each.value.experiment]
            rows.append(
                {
                    "exhibit": exhibit.id,
                    "value": each.value.label,
                    "unit": each.value.unit,
                    "paper": each.value.paper,
                    "ours": each.ours,
                    "low": each.low,
                    "high": each.high,
                    "repeats": each.repeats,
                    "quick": bool(used and used[0].quick),
                    "ratio": each.ratio,
                    "verdict": each.verdict,
                }
            )
            if each.value.bar is not None and each.ours is not None:
                bars.append({"name": each.value.name, "value": round(each.ours, 4), "unit": each.value.unit})
    bars.append(
        {"name": "reproduce.without_row", "value": len(without_row(EXHIBITS)), "unit": "tables and figures"}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"benchmark": "reproduce", "machine": machine(), "rows": rows, "bars": bars}, indent=1)
    )
    say(f"written to {path}")


def without_row(exhibits: Sequence[Exhibit]) -> list[str]:
    """Exhibits that have neither an experiment nor a place in the code nor a reason."""
    return [each.id for each in exhibits if not (each.values or each.code or each.note)]


def print_list(store: Store, chosen: Sequence[Experiment], options: argparse.Namespace) -> None:
    """Print the experiments with what is stored and how long the rest takes."""
    quick = options.quick
    table = Table(Column("experiment", no_wrap=True), "measures", "a repeat takes", "done", "left")
    total = 0.0
    for each in chosen:
        done = len(store.current(each, quick, options.text is not None))
        a_repeat, repeats = estimate(store, each, quick), each.repeats(quick, options.repeats)
        left = max(0, repeats - done) * a_repeat
        total += left
        shown = [exhibit.id for exhibit in EXHIBITS if each.id in exhibit.experiments]
        table.add_row(
            each.id,
            ", ".join(shown),
            duration(a_repeat),
            f"{min(done, repeats)} of {repeats}",
            duration(left) if left else "",
        )
    out = Console()
    out.print(table)
    out.print(f"{'quick' if quick else 'in full'}: {duration(total)} left", highlight=False)


def _run(store: Store, chosen: Sequence[Experiment], options: argparse.Namespace) -> list[Work]:
    text = options.text is not None
    if options.fresh:
        for experiment in chosen:
            store.forget(experiment, options.quick, text)
    work = outstanding(store, chosen, options.quick, options.repeats, text)
    if not work:
        say("all repeats are stored; --fresh runs them again")
    return run_all(store, work, options.quick, options.text)
