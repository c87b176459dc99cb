"""Releases nodes and takes them back, as steps of a replacement, which places all workers anew.

To release nodes, the engine starts no new tasks on them, so the new form runs on the other nodes. Each released
node ends after the last task of the old form. To take nodes back, the engine asks the master for as many nodes as
were released. The replacement continues when they have joined, or after ``_JOIN_TIMEOUT`` seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.driver.engine import Engine
from penstock.driver.steps import Cause, Problem, Step, Watch

_JOIN_TIMEOUT = 60.0
"""Seconds to wait for nodes that were requested again. A busy machine needs about ten to start an executor."""


def release_step(engine: Engine, nodes: frozenset[str]) -> Step:
    """Return the step that releases nodes. Its undo asks the master for as many nodes as were released."""
    return Step("nodes_released", lambda: engine.release_nodes(nodes), undo=engine.take_nodes_back)


def take_back_steps(engine: Engine, wanted: int, watch: Sequence[Watch]) -> Iterator[Step]:
    """Request the released nodes again, and wait until there are ``wanted`` nodes. If they do not join in time,
    the replacement uses the nodes that are there."""

    def ignore_timeout(problem: Problem) -> Problem | None:
        return None if problem.cause is Cause.TIMED_OUT else problem

    yield Step("nodes_asked_back", engine.take_nodes_back)
    yield Step(
        "nodes_joined",
        until=lambda: len(engine.nodes()) >= wanted,
        poll=True,
        limit=_JOIN_TIMEOUT,
        watch=watch,
        on_problem=ignore_timeout,
    )
