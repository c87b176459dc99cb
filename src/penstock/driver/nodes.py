"""Releases nodes as a step of a replacement, and describes released nodes that were requested again.

To release nodes, the engine starts no new tasks on them, so the new form runs on the other nodes. Each released
node ends after the last task of the old form. To take nodes back, the engine asks the master for as many nodes as
were released. The topology runs on as it is meanwhile, and other changes are carried out. When the nodes have
joined, or after ``JOIN_TIMEOUT`` seconds, a replacement places all workers anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.driver.engine import Engine
from penstock.driver.steps import Step

JOIN_TIMEOUT = 60.0
"""Seconds to wait for nodes that were requested again. A busy machine needs about ten to start an executor."""


@dataclass(frozen=True)
class AwaitedNodes:
    """Nodes that were requested again."""

    wanted: int
    """Number of all nodes when they have joined."""
    deadline: float
    """When they are no longer awaited, on the monotonic clock. The nodes that are there are used then."""
    reason: str
    """Why they were requested."""


def release_step(engine: Engine, nodes: frozenset[str]) -> Step:
    """Return the step that releases nodes. Its undo asks the master for as many nodes as were released."""
    return Step("nodes_released", lambda: engine.release_nodes(nodes), undo=engine.take_nodes_back)
