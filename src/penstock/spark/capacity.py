"""Counts Spark's task slots and reserves them for topologies. Real-Time Mode holds a slot per task for the life of
the query; with too few slots ``start`` succeeds and the query fails later, so they are counted before."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

from pyspark.sql import SparkSession

from penstock.driver.engine import Shortage
from penstock.metrics.machine import usable_cores
from penstock.spark.nodes import nodes_of
from penstock.spark.session import expected, is_local, one_machine, total_slots

_SETTLED = 3.0
"""Seconds without a new node after which all nodes are assumed to have joined, if their number is unknown. A
longer wait would delay every start on such a cluster."""
_LATE = 15.0
"""Seconds to wait for further nodes if their number is known. A node may be lost, and the slots of the others may
be enough."""

_held: dict[int, int] = {}
"""Reserved slots by holder."""
_lock = threading.Lock()


def reserve(spark: SparkSession, holder: int, wanted: int, elsewhere: int = 0) -> Shortage | None:
    """Reserve ``wanted`` slots until ``release``. Returns None if they are reserved, otherwise the shortage. A
    holder that has reserved slots already keeps those. May be called by any thread.

    ``elsewhere``: how many reserved slots are on nodes that are being released, which Spark no longer counts.
    """
    with _lock:
        if holder in _held:
            return None
        reserved = sum(_held.values()) - elsewhere
        total = total_slots(spark)
        if total - reserved >= wanted:
            _held[holder] = wanted
            return None
    master = spark.sparkContext.master
    return Shortage(total - reserved, total, master, is_local(master))


def free(spark: SparkSession) -> int:
    """Return the number of slots that are not reserved."""
    with _lock:
        return total_slots(spark) - sum(_held.values())


def cores(spark: SparkSession) -> int:
    """Return the number of cores that the master offers. On this machine these are the cores that the process may
    use, because ``local[N]`` says how many tasks may run, whatever the machine is like."""
    slots = total_slots(spark)
    return min(slots, usable_cores()) if one_machine(spark.sparkContext.master) else slots


def alone(holders: Collection[int]) -> bool:
    """Return whether only these holders have reserved slots."""
    with _lock:
        return all(each in holders for each in _held)


def release(holder: int) -> None:
    """Release the slots of a holder, if it has any."""
    with _lock:
        _held.pop(holder, None)


class NodeWait:
    """Detects when all expected nodes accept tasks. If their number is unknown, it waits until no further node has
    joined for a while. Without this wait, a topology could start on the first node alone if that has enough slots,
    and would stay there."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._local = is_local(spark.sparkContext.master)
        self._wanted = None if self._local else expected(spark.sparkContext.master)
        self._nodes, self._since = 0, time.monotonic()

    def over(self) -> bool:
        """Return whether the wait is over. Called periodically by one thread. Raises ``TopologyFailed`` if Spark
        does not answer."""
        if self._local:
            return True
        now, found = time.monotonic(), nodes_of(self._spark).present()
        if found > self._nodes:
            self._nodes, self._since = found, now
        if not self._nodes:
            return False
        waited = now - self._since
        return waited > _LATE or (self._nodes >= self._wanted if self._wanted else waited > _SETTLED)
