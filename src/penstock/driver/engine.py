"""What the driver needs of the engine that runs workers as long-running tasks. ``penstock.spark.engine``
implements it on Spark; tests have one in memory.

Nothing here waits for long: what takes time is asked for again and again by a step (``driver.steps``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.protocol.job import Job


def executor_of(node: str) -> str:
    """The engine's own name of a node that workers call ``host/executor``."""
    return node.rpartition("/")[2]


@dataclass(frozen=True)
class QueryLaunch:
    """What a query is made from."""

    attempt: int
    """The number of the query run: workers name it when they connect."""
    job: Job
    slots: tuple[int, ...]
    """Tasks of each stage."""
    placed: bool
    """The driver tells each task which worker it is when all have connected; otherwise task n is worker n."""
    modules: Path | None
    """The user's modules in a zip, if there are any."""
    address: tuple[str, int]
    secret: bytes


class Query(Protocol):
    """A query that was launched: a set of long-running tasks. Methods may be called from any thread."""

    def is_active(self) -> bool: ...

    def why_ended(self) -> str:
        """Of one that is not active: the engine's own explanation, in one line."""
        ...

    def stop(self) -> None:
        """Whatever state it is in; it may have ended in any way. Does not raise."""
        ...


@dataclass(frozen=True)
class Shortage:
    """Task slots that could not be reserved."""

    free: int
    total: int
    """Those that the engine offers now."""
    master: str
    """What offers them, for messages."""
    final: bool
    """No more will come: waiting is of no use."""


class Engine(Protocol):
    """One session of the engine, shared by all topologies of this process. Called by one thread of a topology at a
    time. Methods raise ``TopologyFailed`` where the engine does not answer for a while, and anything where it has
    died."""

    # ---- task slots ------------------------------------------------------------------------------------

    def nodes_settled(self) -> bool:
        """Whether all nodes that are expected take tasks. Asked from time to time while somebody waits for them;
        where nobody knows their number, it answers by how long ago the last one came."""
        ...

    def reserve(self, holder: int, slots: int, elsewhere: int = 0) -> Shortage | None:
        """Hold so many task slots until ``free``; a second call of the same holder changes nothing. ``elsewhere``:
        so many of those held are on nodes that are being released, which are not offered any more. None: they are
        held."""
        ...

    def free(self, holder: int) -> None:
        """Give the slots back, if any."""
        ...

    def room(self) -> int:
        """Task slots that nobody holds."""
        ...

    def total(self) -> int:
        """Task slots that there are."""
        ...

    def shared_with_others(self, holders: Collection[int]) -> bool:
        """Whether anybody but these holds slots."""
        ...

    # ---- queries ---------------------------------------------------------------------------------------

    def launch(self, launch: QueryLaunch) -> Query:
        """Start a query; its workers connect by themselves."""
        ...

    def exit_status(self, pid: int, patience: float) -> int | None:
        """How a worker process of this machine ended, as ``subprocess`` has it; waits for the word so many
        seconds. None: nobody said."""
        ...

    # ---- nodes -----------------------------------------------------------------------------------------

    def nodes(self) -> list[str]:
        """The names (``executor_of``) of the nodes that take tasks."""
        ...

    @property
    def nodes_away(self) -> int:
        """Nodes that were released and not taken back."""
        ...

    def can_release_nodes(self) -> bool: ...

    def release_nodes(self, nodes: Collection[str]) -> None:
        """Have these nodes take no new tasks; each ends with its last task, and the master may use the machine for
        something else."""
        ...

    def take_nodes_back(self) -> None:
        """Ask the master for as many nodes as were released; they join in their own time."""
        ...

    # ---- the rest --------------------------------------------------------------------------------------

    def pickle(self, value: Any) -> bytes:
        """As the workers of this engine unpickle it."""
        ...

    def user_modules(self) -> Path | None:
        """The user's own modules as they are now, in a zip; None: there are none."""
        ...

    def warning(self) -> str:
        """What the user must know about this engine while a query runs, such as open ports; empty: nothing."""
        ...

    def last_words(self) -> str:
        """The newest lines that the engine printed, to explain its death."""
        ...

    def close(self) -> None:
        """The topology has ended: leave the session as it was found. Does not raise."""
        ...
