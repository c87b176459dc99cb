"""The report of the chaos tests: ``results/chaos.json`` for programs, ``results/chaos.md`` for readers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

JSON, TEXT = Path("results/chaos.json"), Path("results/chaos.md")


def write(reports: Sequence[dict[str, Any]]) -> str:
    """Both files; returns a line with the sum."""
    JSON.parent.mkdir(exist_ok=True)
    JSON.write_text(json.dumps({"campaigns": list(reports), "bars": bars(reports)}, indent=1))
    TEXT.write_text(summary(reports))
    return f"{total(reports)}; {TEXT} and {JSON} have the seeds"


def total(reports: Sequence[dict[str, Any]]) -> str:
    events, lost, wrong = (sum(one[name] for one in reports) for name in ("events", "lost", "wrong"))
    good = sum(one["good"] for one in reports)
    return f"{events} events in {len(reports)} campaigns, {good} of them good: {lost} lost, {wrong} wrong"


def bars(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A campaign that came to no verdict counts as one that lost something: see ``summary`` for what it was."""
    events, lost, wrong = (sum(one[name] for one in reports) for name in ("events", "lost", "wrong"))
    return [
        {"name": "chaos.events", "value": events, "unit": ""},
        {"name": "chaos.campaigns", "value": len(reports), "unit": ""},
        {"name": "chaos.campaigns_good", "value": sum(one["good"] for one in reports), "unit": ""},
        {"name": "chaos.lost", "value": lost, "unit": "records"},
        {"name": "chaos.wrong", "value": wrong, "unit": "rows and counts"},
    ]


def summary(reports: Sequence[dict[str, Any]]) -> str:
    """For people, in Markdown."""
    lines = [
        "# Chaos on Spark",
        "",
        f"{total(reports)}.",
        "",
        "| seed | source → sink | guarantee | executors | events | drivers | rows | lost | wrong | doubled | s ||",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in reports:
        cells = (
            one["seed"],
            f"{one['source']} → {one['sink']}",
            one["delivery"].replace("_", " "),
            one["executors"] or "local",
            *(one[name] for name in ("events", "drivers", "rows", "lost", "wrong", "doubled", "seconds")),
            "good" if one["good"] else "BAD",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    kinds = Counter(each["kind"] for one in reports for each in one["happened"] if "skipped" not in each)
    lines += ["", "| event | times |", "|---|---|"]
    lines += [f"| {kind} | {times} |" for kind, times in sorted(kinds.items())]
    for one in reports:
        lines += ["", f"## Seed {one['seed']}", ""]
        lines += [f"- **{fault}**" for fault in one["faults"]]
        for each in one["happened"]:
            told = f"skipped, {each['skipped']}" if "skipped" in each else each["told"].strip()
            lines.append(f"- {each['at']} s: {each['what']}{f' ({told})' if told else ''}")
    return "\n".join(lines) + "\n"
