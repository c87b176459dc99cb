"""The page ``docs/reproduction.md``, made from stored results. Pure: the same results give the same page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.reproduction.model import SEED, TEXT, Exhibit, Experiment, Value
from benchmarks.reproduction.store import Repeat
from benchmarks.reproduction.verdict import BETTER, EQUAL, WORSE, Compared, compare, summary, tolerance

INTRODUCTION = """\
# The papers, reproduced

<!-- Written by `penstock reproduce`; `penstock reproduce --write-only` writes it from the stored results. -->

Every table, figure, algorithm and equation of [the four papers](reference/papers.md), with ours beside it.
`penstock reproduce` (or `make reproduce`) runs the experiments and writes this page:
[how](how-to/measure.md#reproduce-the-papers).

- **Ours** is the median of the repeats, with the lowest and the highest in brackets. **Ratio** is ours divided by
  the paper's.
- **Verdict**: *equal* if the median is within 5 % of the paper's value, or within the tolerance printed beside the
  verdict; otherwise *better* or *worse* in the direction that counts. *Not applicable* comes with the reason; an
  input of our set-up, which was chosen to have the paper's value, is not applicable. The verdict compares values
  only: *Lu 2020* and *Pu 2021* ran on clusters of six and nineteen machines, *Sun 2022* in a network simulator;
  ours ran on one machine of two cores or, where it says so, in a simulator. So ratios within one machine (with a
  mechanism and without it, Penstock beside Storm) say more than absolute rates.
- **In full** means what *duration* says, five times (once if the result is always the same); *n of 5* means that
  repeats are missing. **Quick** means short runs, which show that everything works and little more. **Not run**
  means that there is no result yet.
- The papers print curves without data. Dashed lines and crosses in our pictures are the values that their texts
  state.
"""


@dataclass(frozen=True)
class Findings:
    """Everything the page is made from."""

    exhibits: Sequence[Exhibit]
    experiments: Mapping[str, Experiment]
    repeats: Mapping[str, Sequence[Repeat]]
    """The repeats to show, by experiment."""

    def compared(self, exhibit: Exhibit) -> list[Compared]:
        """Each value of an exhibit beside the paper's."""
        return [
            compare(value, [repeat.values[value.name] for repeat in self.measuring(value)])
            for value in exhibit.values
        ]

    def measuring(self, value: Value) -> list[Repeat]:
        """The repeats that gave this value. A short run may measure only some values of its experiment."""
        return [repeat for repeat in self.repeats[value.experiment] if value.name in repeat.values]

    @property
    def measured(self) -> list[Exhibit]:
        return [each for each in self.exhibits if each.values]


def page(findings: Findings, pictures: Mapping[str, str]) -> str:
    """The page. ``pictures``: path relative to ``docs``, by exhibit."""
    parts = [INTRODUCTION, *_index(findings), *_bars(findings)]
    for paper in dict.fromkeys(each.paper for each in findings.exhibits):
        parts += ["", f"## {paper}"]
        for exhibit in findings.exhibits:
            if exhibit.paper == paper and exhibit.values:
                parts += _exhibit(findings, exhibit, pictures.get(exhibit.id))
    parts += ["", "## The experiments", ""]
    for id in dict.fromkeys(each for exhibit in findings.measured for each in exhibit.experiments):
        parts += _experiment(findings.experiments[id], findings.repeats[id])
    return "\n".join(parts).rstrip() + "\n"


# ---- the index ---------------------------------------------------------------------------------------------


def _index(findings: Findings) -> list[str]:
    lines = ["## Index", ""]
    for paper in dict.fromkeys(each.paper for each in findings.exhibits):
        lines += [f"**{paper}**", "", "| in the paper | shows | here |", "|---|---|---|"]
        for exhibit in findings.exhibits:
            if exhibit.paper == paper:
                lines.append(_row(_linked(exhibit), exhibit.title, _here(findings, exhibit)))
        lines.append("")
    return lines


def _linked(exhibit: Exhibit) -> str:
    return f"[{exhibit.number}](#{anchor(exhibit)})" if exhibit.values else exhibit.number


def _here(findings: Findings, exhibit: Exhibit) -> str:
    parts = []
    if exhibit.values:
        mode = mode_of([repeat for value in exhibit.values for repeat in findings.measuring(value)])
        parts.append(f"**{summary(findings.compared(exhibit))}**{mode}")
    if exhibit.code:
        parts.append("code: " + ", ".join(f"`{_short(path)}`" for path in exhibit.code))
    if exhibit.tests:
        parts.append("checked by " + ", ".join(f"`{_short(path)}`" for path in exhibit.tests))
    if exhibit.note and not exhibit.values:
        parts.append(exhibit.note)
    return "; ".join(parts)


def mode_of(repeats: Sequence[Repeat]) -> str:
    """Says if some or all repeats were short runs."""
    if not repeats:
        return ""
    if all(each.quick for each in repeats):
        return " (quick)"
    return " (partly quick)" if any(each.quick for each in repeats) else ""


def anchor(exhibit: Exhibit) -> str:
    """The anchor that MkDocs gives to the heading of an exhibit."""
    return re.sub(r"[^\w\s-]", "", f"{exhibit.paper} {exhibit.number}".lower()).strip().replace(" ", "-")


def _short(path: str) -> str:
    return path.removeprefix("src/penstock/")


# ---- bars --------------------------------------------------------------------------------------------------


def _bars(findings: Findings) -> list[str]:
    lines = [
        "## Values this project wants to reach",
        "",
        "| what | wanted | ours | reached |",
        "|---|---|---|---|",
    ]
    for exhibit in findings.measured:
        for each in findings.compared(exhibit):
            if each.value.bar is not None:
                sign = "≤" if each.value.better == "lower" else "≥"
                reached = {None: "not run", True: "yes", False: "**no**"}[each.met]
                mode = mode_of(findings.measuring(each.value))
                what = f"[{exhibit.paper}, {exhibit.number}](#{anchor(exhibit)}): {each.value.label}"
                wanted = f"{sign} {number(each.value.bar)} {each.value.unit}"
                lines.append(_row(what, wanted, _ours(each), reached + mode))
    return lines


# ---- an exhibit --------------------------------------------------------------------------------------------


def _exhibit(findings: Findings, exhibit: Exhibit, picture: str | None) -> list[str]:
    lines = ["", f"### {exhibit.paper}, {exhibit.number}", "", f"{exhibit.title}."]
    lines += ["", "| value | paper | ours | ratio | verdict |", "|---|---|---|---|---|"]
    for each in findings.compared(exhibit):
        ratio = "" if each.ratio is None else number(each.ratio)
        lines.append(_row(_labelled(each.value), _paper(each), _ours(each), ratio, _verdict(each)))
    if exhibit.note:
        lines += ["", exhibit.note]
    runs = [_run_line(findings.experiments[id], findings.repeats[id]) for id in exhibit.experiments]
    lines += ["", *[f"- {each}" for each in runs]]
    if picture:
        lines += ["", f"![{exhibit.paper}, {exhibit.number}]({picture})"]
    return lines


def _run_line(experiment: Experiment, repeats: Sequence[Repeat]) -> str:
    link = f"[{experiment.id}](#{experiment.id})"
    if not repeats:
        return f"{link}: **not run**; `penstock reproduce --only {experiment.id}`"
    kind = "quick" if repeats[0].quick else "in full"
    wanted = experiment.repeats(repeats[0].quick)
    if len(repeats) < wanted:
        count = f"{len(repeats)} of {wanted} repeats"
    else:
        count = f"{len(repeats)} repeat{'s' if len(repeats) > 1 else ''}"
    dates = sorted({each.date for each in repeats})
    return f"{link}: {kind}, {count}, {dates[0]}" + (f" to {dates[-1]}" if len(dates) > 1 else "")


def _experiment(experiment: Experiment, repeats: Sequence[Repeat]) -> list[str]:
    lines = [f"### {experiment.id}", "", f"{experiment.title}.", ""]
    command = repeats[0].command if repeats else experiment.command(quick=False)
    lines += [f"- Command of a repeat: `{_shown(command)}`", f"- Duration: {experiment.duration}"]
    if experiment.needs:
        lines.append(f"- Needs {', '.join(experiment.needs)}")
    lines += [f"- Differs from the paper: {each}" for each in experiment.differences]
    if repeats:
        took = [each.seconds for each in repeats]
        each_took = f"{min(took):,.0f} s" if len(took) == 1 else f"{min(took):,.0f} to {max(took):,.0f} s each"
        lines.append(f"- {_run_line(experiment, repeats).partition(': ')[2]}; {each_took}")
        lines += [f"- {machine}" for machine in dict.fromkeys(_machine(each) for each in repeats)]
    else:
        lines.append(f"- **not run**; `penstock reproduce --only {experiment.id}`")
    return [*lines, ""]


def _shown(command: str) -> str:
    return command.replace(SEED, "SEED").replace(TEXT, "BOOK")


def _machine(repeat: Repeat) -> str:
    machine = repeat.machine
    return (
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']:.0f} GB; Python "
        f"{machine['python']}, Spark {machine['pyspark']}, Java {machine['java']}, pyarrow {machine['pyarrow']}, "
        f"Penstock {machine['penstock']}"
    )


# ---- cells -------------------------------------------------------------------------------------------------


def _labelled(value: Value) -> str:
    """The label with the unit, unless the label has the word."""
    said = not value.unit or value.unit in re.split(r"[ ,:]+", value.label)
    return value.label if said else f"{value.label}, {value.unit}"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _paper(compared: Compared) -> str:
    paper = compared.value.paper
    if paper is None:
        return ""
    return f"{number(paper[0])} to {number(paper[1])}" if isinstance(paper, tuple) else number(paper)


def _verdict(compared: Compared) -> str:
    """The verdict, with the reason why it is not applicable, or the tolerance if it is not the usual one."""
    verdict, value = f"**{compared.verdict}**", compared.value
    if value.differs and compared.repeats:
        return f"{verdict}: {value.differs}"
    said = tolerance(value) if compared.verdict in (BETTER, EQUAL, WORSE) else ""
    return f"{verdict} ({said})" if said else verdict


def _ours(compared: Compared) -> str:
    if compared.ours is None or compared.low is None or compared.high is None:
        return ""
    if compared.repeats == 1:
        return number(compared.ours)
    return f"{number(compared.ours)} ({number(compared.low)} to {number(compared.high)})"


def number(value: float) -> str:
    """Three digits, or all digits of a large number."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
