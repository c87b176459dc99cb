"""Nodes are released and taken back, as steps of a replacement: only a replacement puts workers on other nodes all
at once.

Release: the nodes take no new task, so the new form runs on the others; each node ends with the last task of the
old form. Taking back: the master is asked for as many nodes as were released, and the replacement begins when they
have joined, or when there is no point in waiting any longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.driver.engine import Engine
from penstock.driver.steps import Cause, Problem, Step, Watch

_JOINING = 60.0  # seconds for nodes that were taken back; a busy machine starts an executor in ten


def release_step(engine: Engine, nodes: frozenset[str]) -> Step:
    """Undone, the master is asked for others in their place."""
    return Step("nodes_released", lambda: engine.release_nodes(nodes), undo=engine.take_nodes_back)


def take_back_steps(engine: Engine, wanted: int, watch: Sequence[Watch]) -> Iterator[Step]:
    """Wait until there are ``wanted`` nodes. If they do not come, those that are there have to do."""

    def late(problem: Problem) -> Problem | None:
        return None if problem.cause is Cause.TIMED_OUT else problem

    yield Step("nodes_asked_back", engine.take_nodes_back)
    yield Step(
        "nodes_joined",
        until=lambda: len(engine.nodes()) >= wanted,
        poll=True,
        limit=_JOINING,
        watch=watch,
        on_problem=late,
    )
