"""The nodes of a session, Spark's executors: some can be left, so that the master may use or switch off what they
stood on, and asked for again."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from penstock.driver.engine import executor_of
from penstock.errors import TopologyFailed
from penstock.spark.session import is_local

_ALL = 2**31 - 1  # executors: as many as the master has room for
_known: dict[str, Nodes] = {}
"""By application: all topologies of a session have the same nodes."""
T = TypeVar("T")


def nodes_of(spark: SparkSession) -> Nodes:
    return _known.setdefault(spark.sparkContext.applicationId, Nodes(spark))


class Nodes:
    """Asked by one thread at a time. In local mode there is one, the driver, which nobody leaves. Raises
    ``TopologyFailed`` where Spark does not do it: the master may be away for a while."""

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext
        self.away = 0
        """Nodes that were left and not asked for again."""

    def names(self) -> list[str]:
        """Of those that take tasks, as Spark calls them."""
        if is_local(self._context.master):
            return ["driver"]

        def ask() -> list[str]:
            ids = self._scheduler().getExecutorIds()
            every = [str(ids.apply(index)) for index in range(ids.size())]
            return [each for each in every if self._takes_tasks(each)]

        return _asked("its executors are not known", ask)

    def _takes_tasks(self, executor: str) -> bool:
        """Spark lists an executor as active from its registration, but uses none of its cores before the executor
        reports that it has been launched, up to seconds later on a busy machine. Until then it has neither a free
        core nor a task, and a query that starts gets no task there."""
        backend = self._scheduler()
        if not backend.isExecutorActive(executor):
            return False
        # Scala's decimal as text: Py4J takes it for a whole number, and fails on its fraction.
        free = backend.getExecutorAvailableCpus(executor).iterator().mkString()
        launched = bool(free) and float(free) > 0
        return launched or bool(self._context._jsc.sc().taskScheduler().isExecutorBusy(executor))

    def present(self) -> int:
        """Nodes that take tasks."""
        return len(self.names())

    def leavable(self) -> bool:
        """A session that others opened may not have what it takes."""
        return str(self._context.getConf().get("spark.decommission.enabled")) == "true"

    def leave(self, nodes: Collection[str]) -> None:
        """Take no new tasks there; each ends when the last task that it has does, and none is started instead."""
        active = self.names()
        leaving = {executor_of(node) for node in nodes} & set(active)
        self._want(len(active) - len(leaving))
        self.away += len(leaving)

        def leave() -> None:
            jvm, backend = self._context._jvm, self._scheduler()
            assert jvm is not None
            why = jvm.org.apache.spark.scheduler.ExecutorDecommissionInfo("left", jvm.scala.Option.empty())
            for executor in leaving:
                backend.decommissionExecutor(executor, why, False, False)

        _asked("its executors could not be released", leave)

    def ask_back(self) -> None:
        """Have the master start others for those that were left; they join in their own time."""
        if self.away:
            # A standalone master takes a number as a limit, others as an order.
            standalone = self._context.master.startswith(("spark://", "local-cluster"))
            self._want(_ALL if standalone else self.present() + self.away)
            self.away = 0

    def _want(self, executors: int) -> None:
        def want() -> bool:
            empty = getattr(self._context._jvm, "scala.collection.immutable.Map$").__getattr__("MODULE$").empty()
            return bool(self._context._jsc.sc().requestTotalExecutors(executors, 0, empty))

        if not _asked("the master could not be told how many executors are wanted", want):
            raise TopologyFailed("Spark", f"the master does not agree to at most {executors} executors")

    def _scheduler(self) -> Any:
        return self._context._jsc.sc().schedulerBackend()


def _asked(problem: str, ask: Callable[[], T]) -> T:
    try:
        return ask()
    except (Py4JError, OSError) as error:
        said = str(error).splitlines() or [type(error).__name__]
        raise TopologyFailed("Spark", f"{problem} ({said[0]})") from error
