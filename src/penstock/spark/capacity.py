"""Spark's task slots and who holds them. Real-Time Mode holds a slot per task for as long as the query runs: with
too few, ``start`` succeeds and the query dies later, so they are counted before."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

from pyspark.sql import SparkSession

from penstock.driver.engine import Shortage
from penstock.spark.nodes import nodes_of
from penstock.spark.session import expected, is_local, total_slots

_SETTLED = 3.0  # seconds without another node after which those that are there are all, where nobody knows
_LATE = 15.0  # seconds for nodes that are known to come; the slots of a lost one may well be enough without

_held: dict[int, int] = {}
_lock = threading.Lock()


def reserve(spark: SparkSession, holder: int, wanted: int, elsewhere: int = 0) -> Shortage | None:
    """Hold so many slots, until ``release``; who holds some already keeps those. None: they are held.
    ``elsewhere``: so many of those that are held are on nodes that are being released, which Spark does not count
    any more. In local mode no more slots can come."""
    with _lock:
        if holder in _held:
            return None
        taken = sum(_held.values()) - elsewhere
        total = total_slots(spark)
        if total - taken >= wanted:
            _held[holder] = wanted
            return None
    master = spark.sparkContext.master
    return Shortage(total - taken, total, master, is_local(master))


def free(spark: SparkSession) -> int:
    """Slots that nobody holds."""
    with _lock:
        return total_slots(spark) - sum(_held.values())


def alone(holders: Collection[int]) -> bool:
    """Nobody else holds any."""
    with _lock:
        return all(each in holders for each in _held)


def release(holder: int) -> None:
    """Give them back, if any."""
    with _lock:
        _held.pop(holder, None)


class NodeWait:
    """Waits until all expected nodes take tasks; if their number is unknown, until no further one has done so for
    a while. With the first node alone there may be slots enough, and a topology stays where it is started."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._local = is_local(spark.sparkContext.master)
        self._wanted = None if self._local else expected(spark.sparkContext.master)
        self._nodes, self._since = 0, time.monotonic()

    def over(self) -> bool:
        """Asked from time to time."""
        if self._local:
            return True
        now, found = time.monotonic(), nodes_of(self._spark).present()
        if found > self._nodes:
            self._nodes, self._since = found, now
        if not self._nodes:
            return False
        waited = now - self._since
        return waited > _LATE or (self._nodes >= self._wanted if self._wanted else waited > _SETTLED)
