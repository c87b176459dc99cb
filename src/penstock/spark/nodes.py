"""The nodes of a session, Spark's executors: some can be left, so that the master may use or switch off what they
stood on, and asked for again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pyspark.sql import SparkSession

from penstock.spark.session import is_local

_ALL = 2**31 - 1  # executors: as many as the master has room for


def executor_of(node: str) -> str:
    """Spark's name of it."""
    return node.rpartition("/")[2]


class Nodes:
    """Asked by one thread at a time. In local mode there is one, the driver, which nobody leaves."""

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext
        self.away = 0
        """Nodes that were left and not asked for again."""

    def present(self) -> int:
        """Nodes that take tasks."""
        return len(self.names())

    def leave(self, nodes: Collection[str]) -> None:
        """Take no new tasks there; each ends when the last task that it has does, and none is started instead."""
        active = self.names()
        leaving = {executor_of(node) for node in nodes} & set(active)
        self._want(len(active) - len(leaving))
        self.away += len(leaving)
        jvm, backend = self._context._jvm, self._scheduler()
        assert jvm is not None
        why = jvm.org.apache.spark.scheduler.ExecutorDecommissionInfo("left", jvm.scala.Option.empty())
        for executor in leaving:
            backend.decommissionExecutor(executor, why, False, False)

    def ask_back(self) -> None:
        """Have the master start others for those that were left; they join in their own time."""
        if self.away:
            # A standalone master takes a number as a limit, others as an order.
            standalone = self._context.master.startswith(("spark://", "local-cluster"))
            self._want(_ALL if standalone else self.present() + self.away)
            self.away = 0

    def _want(self, executors: int) -> None:
        empty = getattr(self._context._jvm, "scala.collection.immutable.Map$").__getattr__("MODULE$").empty()
        self._context._jsc.sc().requestTotalExecutors(executors, 0, empty)

    def names(self) -> list[str]:
        """Of those that take tasks, as Spark calls them."""
        if is_local(self._context.master):
            return ["driver"]
        ids = self._scheduler().getExecutorIds()
        every = [str(ids.apply(index)) for index in range(ids.size())]
        return [each for each in every if self._scheduler().isExecutorActive(each)]

    def _scheduler(self) -> Any:
        return self._context._jsc.sc().schedulerBackend()
