"""Spark's task slots and who holds them. Real-Time Mode holds a slot per task for as long as the query runs: with
too few, ``start`` succeeds and the query dies later, so they are counted before."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

from pyspark.sql import SparkSession

from penstock.errors import NotEnoughSlots
from penstock.spark.nodes import nodes_of
from penstock.spark.session import expected, is_local, total_slots

_LOOK = 0.2  # seconds between two looks at a cluster whose nodes may still be joining
_SETTLED = 3.0  # seconds without another node after which those that are there are all, where nobody knows
_LATE = 15.0  # seconds for nodes that are known to come; the slots of a lost one may well be enough without

_held: dict[int, int] = {}
_lock = threading.Lock()


def reserve(
    spark: SparkSession, topology: str, holder: int, wanted: int, timeout: float, elsewhere: int = 0
) -> None:
    """Hold so many slots. Raises ``NotEnoughSlots`` where there are fewer: at once in local mode, where none can
    come, else after ``timeout`` seconds. Where there is time, all nodes are waited for: with the first alone there
    may be slots enough, and a topology stays where it is started. ``elsewhere``: so many of those that are held
    are on nodes that are being left, which Spark does not count any more."""
    deadline = time.monotonic() + timeout
    master = spark.sparkContext.master
    await_nodes(spark, timeout)
    while True:
        with _lock:
            taken = sum(_held.values()) - elsewhere
            free = total_slots(spark) - taken
            if free >= wanted:
                _held[holder] = wanted
                return
        if is_local(master) or time.monotonic() > deadline:
            raise NotEnoughSlots(
                f"topology '{topology}'",
                f"it needs {wanted} task slots of Spark, one per executor (fused components share "
                f"theirs), but only {free} of {free + taken} are free on {master}",
                "Lower the parallelism, or give the master more: local[N] counts threads, not cores.",
            )
        time.sleep(_LOOK)


def free(spark: SparkSession) -> int:
    """Slots that nobody holds."""
    with _lock:
        return total_slots(spark) - sum(_held.values())


def alone(holders: Collection[int]) -> bool:
    """Nobody else holds any."""
    with _lock:
        return all(each in holders for each in _held)


def await_nodes(spark: SparkSession, timeout: float) -> None:
    """Wait until all expected nodes take tasks; if their number is unknown, until no further one has done so for a
    while. At most ``timeout`` seconds."""
    master = spark.sparkContext.master
    if is_local(master):
        return
    wanted, now = expected(master), time.monotonic()
    begun, nodes, since = now, 0, now
    while now - begun < timeout:
        found = nodes_of(spark).present()
        if found > nodes:
            nodes, since = found, now
        if nodes and (nodes >= wanted if wanted else now - since > _SETTLED):
            return
        if nodes and now - since > _LATE:
            return
        time.sleep(_LOOK)
        now = time.monotonic()


def release(holder: int) -> None:
    """Give them back, if any."""
    with _lock:
        _held.pop(holder, None)
