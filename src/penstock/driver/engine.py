"""The interface between the driver and the engine that runs workers as long-running tasks.
``penstock.spark.engine`` implements it on Spark; tests have an implementation in memory.

No method waits for long. If something takes time, a step (``driver.steps``) polls for it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from penstock.protocol.job import Job


def executor_of(node: str) -> str:
    """Return the engine's name of a node. Workers name a node ``host/executor``; the engine's name is the part
    after the slash."""
    return node.rpartition("/")[2]


@dataclass(frozen=True)
class QueryLaunch:
    """The parameters of a query that is launched."""

    attempt: int
    """The number of the query run. Workers send it when they connect."""
    job: Job
    slots: tuple[int, ...]
    """Number of the engine's tasks in each stage."""
    placed: bool
    """True: when all tasks have connected, the driver tells each of them which worker it runs. False: task n of a
    stage runs worker n."""
    modules: Path | None
    """The user's modules in a zip file, if there are any."""
    address: tuple[str, int]
    """Host and port of the coordinator."""
    secret: bytes = field(repr=False)
    """The secret with which workers authenticate."""


class Query(Protocol):
    """A query that was launched: a set of long-running tasks. Methods may be called from any thread."""

    def is_active(self) -> bool: ...

    def why_ended(self) -> str:
        """Return the engine's explanation in one line. Called only if the query is not active."""
        ...

    def stop(self) -> None:
        """Stop the query in whatever state it is; it may have ended already. Does not raise."""
        ...


@dataclass(frozen=True)
class Shortage:
    """Explains why task slots could not be reserved."""

    free: int
    """Number of task slots that are not reserved."""
    total: int
    """Number of task slots that the engine offers now."""
    master: str
    """Names the engine in messages."""
    final: bool
    """Whether the engine will never offer more, so that waiting is useless."""


class Engine(Protocol):
    """One session of the engine. All topologies of this process share it; at most one thread of each topology
    calls it at a time. Methods raise ``TopologyFailed`` if the engine refuses or does not answer for a while, and
    any exception if the engine has died."""

    # ---- task slots ------------------------------------------------------------------------------------

    def nodes_settled(self) -> bool:
        """Whether all expected nodes accept tasks. Called periodically while a step waits for nodes. If the number
        of nodes is unknown, this is true when no node has joined for a while."""
        ...

    def reserve(self, holder: int, slots: int, elsewhere: int = 0) -> Shortage | None:
        """Reserve ``slots`` task slots until ``free`` is called. Returns None if they are reserved, otherwise the
        shortage. A holder that has reserved slots already keeps those. ``elsewhere``: how many of all reserved
        slots are on nodes that are being released, which the engine no longer offers."""
        ...

    def free(self, holder: int) -> None:
        """Release the slots of a holder, if it has any."""
        ...

    def free_slots(self) -> int:
        """Return the number of task slots that are not reserved."""
        ...

    def total(self) -> int:
        """Return the number of all task slots."""
        ...

    def cores(self) -> int:
        """Return the number of cores that the engine offers to a topology. On a cluster, call it only when the
        nodes have settled."""
        ...

    def shared_with_others(self, holders: Collection[int]) -> bool:
        """Whether any other holder has reserved slots."""
        ...

    # ---- queries ---------------------------------------------------------------------------------------

    def launch(self, launch: QueryLaunch) -> Query:
        """Start a query. Does not wait for its workers, which connect to the coordinator later."""
        ...

    def exit_status(self, pid: int, patience: float) -> int | None:
        """Return the exit status of a worker process of this machine, as in ``subprocess``. Waits up to
        ``patience`` seconds for it. None if it is still unknown then."""
        ...

    # ---- nodes -----------------------------------------------------------------------------------------

    def nodes(self) -> list[str]:
        """Return the nodes that accept tasks, by the engine's names (``executor_of``)."""
        ...

    @property
    def nodes_away(self) -> int:
        """Number of nodes that were released and not requested again."""
        ...

    def can_release_nodes(self) -> bool: ...

    def release_nodes(self, nodes: Collection[str]) -> None:
        """Release nodes: they accept no new tasks, and each ends after its last task. The master may then use
        their machines for other applications."""
        ...

    def take_nodes_back(self) -> None:
        """Ask the master for as many nodes as were released. Does not wait; the nodes join later."""
        ...

    # ---- the rest --------------------------------------------------------------------------------------

    def pickle(self, value: Any) -> bytes:
        """Pickle a value so that the workers of this engine can unpickle it."""
        ...

    def user_modules(self) -> Path | None:
        """Write the user's modules, as they are now, to a zip file and return its path. None if there are no
        modules."""
        ...

    def warning(self) -> str:
        """Return a warning that users must see while a query runs, such as about open ports. Empty if there is
        none."""
        ...

    def last_log_lines(self) -> str:
        """Return the newest lines that the engine printed, to explain why it died."""
        ...

    def close(self) -> None:
        """Restore the session to the state before the topology. Called when the topology has ended. Does not
        raise."""
        ...
