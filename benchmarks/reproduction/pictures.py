"""The pictures of the reproduction, numbered as in the papers: our repeats and the paper's values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.reproduction.model import Exhibit, Picture
from benchmarks.reproduction.report import Findings, mode_of
from benchmarks.reproduction.verdict import NOT_RUN, Compared

FOLDER = "figures/reproduction"
"""Below ``docs``."""
_WIDTH, _HEIGHT, _DPI = 7.0, 3.6, 90


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
    else:
        _draw_bars(axes, [each for each in findings.compared(exhibit) if each.value.unit == picture.unit])
    mode = mode_of([r for id in exhibit.experiments for r in findings.repeats[id]])
    axes.set(xlabel=picture.x, ylabel=picture.y, title=f"{exhibit.paper}, {exhibit.number}{mode}")
    if picture.logarithmic:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})


def _draw_curves(axes: Any, findings: Findings, picture: Picture) -> None:
    """Each curve of all repeats in one colour, and the paper's values."""
    for place, curve in enumerate(picture.curves):
        found = [r.curves[curve.name] for r in findings.repeats[curve.experiment] if curve.name in r.curves]
        for number, (x, y) in enumerate(found):
            alpha = 1.0 if len(found) == 1 else 0.6
            axes.plot(x, y, color=f"C{place}", alpha=alpha, linewidth=1.2, label=None if number else curve.label)
    for place, (label, level) in enumerate(picture.lines):
        axes.axhline(level, color=f"C{place}", linestyle="--", linewidth=1, label=f"paper: {label}")
    for place, (label, across, up) in enumerate(picture.points):
        axes.plot(across, up, "x", color=f"C{place}", label=f"paper: {label}")


def _draw_bars(axes: Any, compared: Sequence[Compared]) -> None:
    """The paper's value and ours side by side, with the range of the repeats."""
    shown = [each for each in compared if each.ours is not None]
    for place, each in enumerate(shown):
        paper, ours = each.value.paper, each.ours
        assert ours is not None
        assert each.low is not None
        assert each.high is not None
        label = not place
        if isinstance(paper, tuple):
            low, high = paper
            axes.bar(place - 0.2, high - low, 0.38, low, color="C7", label="paper" if label else None)
        elif paper is not None:
            axes.bar(place - 0.2, paper, 0.38, color="C7", label="paper" if label else None)
        spread = [[ours - each.low], [each.high - ours]]
        axes.bar(place + 0.2, ours, 0.38, yerr=spread, capsize=3, color="C0", label="ours" if label else None)
    axes.set_xticks(range(len(shown)), [each.value.label for each in shown], fontsize=7, rotation=20, ha="right")
