"""All tables, figures and algorithms of the papers, and all experiments."""

from __future__ import annotations

from benchmarks.reproduction import lu2020, pu2021, storm_overview, sun2022
from benchmarks.reproduction.model import Exhibit, Experiment

_PAPERS = (lu2020, storm_overview, pu2021, sun2022)

EXHIBITS: tuple[Exhibit, ...] = tuple(exhibit for paper in _PAPERS for exhibit in paper.EXHIBITS)
EXPERIMENTS: dict[str, Experiment] = {each.id: each for paper in _PAPERS for each in paper.EXPERIMENTS}
