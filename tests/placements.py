"""Placement snapshots shared by several tests."""

from __future__ import annotations

from benchmarks.large_cluster import NODE, large
from penstock.control.placement import ExecutorStream, PlacedExecutor, PlacementNode, PlacementSnapshot

__all__ = ["NODE", "example_of_pu_2021", "large"]

FIGURE_3 = {
    **dict.fromkeys(("a", "d1", "f1"), "n1"),
    **dict.fromkeys(("b", "d2", "f2", "h"), "n2"),
    **dict.fromkeys(("c", "e", "g", "i"), "n3"),
}

FIGURE_2 = {
    "a": ("c", "d1", "d2"),
    "b": ("d1", "d2", "e"),
    "c": ("f1", "f2"),
    "d1": ("f1", "f2"),
    "d2": ("f1", "f2"),
    "e": ("f1", "f2", "g"),
    "f1": ("h", "i"),
    "f2": ("h", "i"),
    "g": ("i",),
}
"""The text of Pu 2021 gives 11 executors, 20 edges, the children of a and b, and that i has parents on n1 and n2.
The rest of the figure is not in the text; here it is a simple topology with these numbers."""

ON_FIGURE_4 = ("a", "d1", "f2", "h")


def example_of_pu_2021(cpu=None, places=None, limits=None, memory=None):
    """Figures 2 to 4 of Pu 2021. The executors on the critical path of figure 4 are the busiest."""
    places = FIGURE_3 | (places or {})
    busy = {name: 0.5 if name in ON_FIGURE_4 else 0.1 for name in FIGURE_3} | (cpu or {})
    executors = tuple(
        PlacedExecutor(name, name[0], node, busy[name], (memory or {}).get(name, 1e8))
        for name, node in places.items()
    )
    streams = tuple(ExecutorStream(source, target, 100.0, 1e4) for source, to in FIGURE_2.items() for target in to)
    nodes = tuple(PlacementNode(name, (limits or {}).get(name, NODE)) for name in ("n1", "n2", "n3"))
    return PlacementSnapshot(nodes, executors, streams)
