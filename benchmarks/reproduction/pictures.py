"""The pictures of the reproduction, numbered as in the papers: our repeats and the paper's values."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.reproduction.model import Exhibit, Picture
from benchmarks.reproduction.report import Findings, mode_of
from benchmarks.reproduction.verdict import NOT_RUN, Compared

FOLDER = "figures/reproduction"
"""Below ``docs``."""
_WIDTH, _HEIGHT, _DPI = 8.5, 3.6, 90
_ROW = 0.32  # height of a pair of bars


def picture_paths(findings: Findings) -> dict[str, str]:
    """The path below ``docs`` of each picture that can be drawn from the results, by exhibit."""
    return {
        exhibit.id: f"{FOLDER}/{exhibit.id}.png"
        for exhibit in findings.measured
        if exhibit.picture is not None and _drawable(findings, exhibit, exhibit.picture)
    }


def _drawable(findings: Findings, exhibit: Exhibit, picture: Picture) -> bool:
    if picture.curves:
        return any(curve.name in r.curves for curve in picture.curves for r in findings.repeats[curve.experiment])
    return any(each.verdict != NOT_RUN and each.value.unit == picture.unit for each in findings.compared(exhibit))


def draw_all(findings: Findings, docs: Path) -> list[Path]:
    """Draw all pictures."""
    drawn = []
    for exhibit in findings.measured:
        path = picture_paths(findings).get(exhibit.id)
        if path is None or exhibit.picture is None:
            continue
        (docs / path).parent.mkdir(parents=True, exist_ok=True)
        _draw(findings, exhibit, exhibit.picture, docs / path)
        drawn.append(docs / path)
    return drawn


def _draw(findings: Findings, exhibit: Exhibit, picture: Picture, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    axes = figure.subplots()
    if picture.curves:
        _draw_curves(axes, findings, picture)
        axes.set(xlabel=picture.x, ylabel=picture.y)
    else:
        in_unit = [each for each in findings.compared(exhibit) if each.value.unit == picture.unit]
        shown = [each for each in in_unit if each.ours is not None]
        figure.set_figheight(max(_HEIGHT, _ROW * len(shown)))
        _draw_bars(axes, shown)
        axes.set(xlabel=picture.y)
    mode = mode_of([repeat for value in exhibit.values for repeat in findings.measuring(value)])
    axes.set(title=f"{exhibit.paper}, {exhibit.number}{mode}")
    if picture.logarithmic:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside right upper")  # beside the curves, which it must not hide
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})


def _draw_curves(axes: Any, findings: Findings, picture: Picture) -> None:
    """Each curve in one colour, and the paper's value of the same label in the same colour."""
    colours = {curve.label: f"C{place}" for place, curve in enumerate(picture.curves)}
    for curve in picture.curves:
        found = [r.curves[curve.name] for r in findings.repeats[curve.experiment] if curve.name in r.curves]
        if picture.repeats == "first":
            found = found[:1]
        elif picture.repeats == "median" and found:
            found = [[found[0][0], [statistics.median(y) for y in zip(*(each[1] for each in found), strict=True)]]]
        for number, (x, y) in enumerate(found):
            alpha = 1.0 if len(found) == 1 else 0.6
            label = None if number else curve.label
            axes.plot(x, y, color=colours[curve.label], alpha=alpha, linewidth=1.2, label=label)
    for place, (label, level) in enumerate(picture.lines):
        colour = colours.get(label, ("black", "0.5")[place % 2])
        axes.axhline(level, color=colour, linestyle="--", linewidth=1, label=f"paper: {label}")
    for label, across, up in picture.points:
        axes.plot(across, up, "x", color=colours.get(label, "black"), label=f"paper: {label}")


def _draw_bars(axes: Any, compared: Sequence[Compared]) -> None:
    """The paper's value and ours, one below the other, with the range of the repeats."""
    for place, each in enumerate(compared):
        paper, ours = each.value.paper, each.ours
        assert ours is not None
        assert each.low is not None
        assert each.high is not None
        label = not place
        if isinstance(paper, tuple):
            low, high = paper
            axes.barh(place - 0.2, high - low, 0.38, low, color="C7", label="paper" if label else None)
        elif paper is not None:
            axes.barh(place - 0.2, paper, 0.38, color="C7", label="paper" if label else None)
        spread = [[ours - each.low], [each.high - ours]]
        axes.barh(place + 0.2, ours, 0.38, xerr=spread, capsize=2, color="C0", label="ours" if label else None)
    axes.set_yticks(range(len(compared)), [each.value.label for each in compared], fontsize=8)
    axes.invert_yaxis()
