"""The nodes of a Spark session, which are Spark's executors: releases them, so that the master can use or switch
off their machines, and requests them again."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from penstock.driver.engine import executor_of
from penstock.errors import TopologyFailed
from penstock.spark.session import is_local

_ALL = 2**31 - 1  # executors; the largest number that Spark accepts, so that the master starts as many as fit
_known: dict[str, Nodes] = {}
"""Nodes by application id. All topologies of a session share them."""
T = TypeVar("T")


def nodes_of(spark: SparkSession) -> Nodes:
    """Return the nodes of a session."""
    return _known.setdefault(spark.sparkContext.applicationId, Nodes(spark))


class Nodes:
    """The nodes of one session. Not thread-safe. In local mode there is one node, the driver, which cannot be
    released.

    Methods raise ``TopologyFailed`` if Spark refuses or does not answer; the master may be down for a while.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext
        self.away = 0
        """Nodes that were released and not requested again."""

    def names(self) -> list[str]:
        """Return the executor ids of the nodes that accept tasks."""
        if is_local(self._context.master):
            return ["driver"]

        def ask() -> list[str]:
            ids = self._scheduler().getExecutorIds()
            every = [str(ids.apply(index)) for index in range(ids.size())]
            return [each for each in every if self._takes_tasks(each)]

        return _call_spark("it does not list its executors", ask)

    def _takes_tasks(self, executor: str) -> bool:
        """Return whether Spark runs tasks on an executor.

        Spark lists an executor as active when it registers, but does not use its cores before the executor reports
        that it was launched, which takes seconds on a busy machine. Until then the executor has neither a free
        core nor a task, and a query that starts gets no task there.
        """
        backend = self._scheduler()
        if not backend.isExecutorActive(executor):
            return False
        # Read as text, because Py4J converts Scala's decimal to an integer and fails on its fraction.
        free = backend.getExecutorAvailableCpus(executor).iterator().mkString()
        launched = bool(free) and float(free) > 0
        return launched or bool(self._context._jsc.sc().taskScheduler().isExecutorBusy(executor))

    def present(self) -> int:
        """Return the number of nodes that accept tasks."""
        return len(self.names())

    def can_release(self) -> bool:
        """Return whether nodes can be released. A session that the user opened may not be configured for it."""
        return str(self._context.getConf().get("spark.decommission.enabled")) == "true"

    def release(self, nodes: Collection[str]) -> None:
        """Release nodes: Spark starts no new tasks there, and each executor ends after its last task. The master
        starts no replacement."""
        active = self.names()
        leaving = {executor_of(node) for node in nodes} & set(active)
        self._request_executors(len(active) - len(leaving))
        self.away += len(leaving)

        def leave() -> None:
            jvm, backend = self._context._jvm, self._scheduler()
            assert jvm is not None
            why = jvm.org.apache.spark.scheduler.ExecutorDecommissionInfo("left", jvm.scala.Option.empty())
            for executor in leaving:
                backend.decommissionExecutor(executor, why, False, False)

        _call_spark("its executors could not be released", leave)

    def request_back(self) -> None:
        """Ask the master to start as many executors as were released. They join later."""
        if self.away:
            # A standalone master treats the number as an upper limit; other masters start exactly as many.
            standalone = self._context.master.startswith(("spark://", "local-cluster"))
            self._request_executors(_ALL if standalone else self.present() + self.away)
            self.away = 0

    def _request_executors(self, executors: int) -> None:
        def want() -> bool:
            empty = getattr(self._context._jvm, "scala.collection.immutable.Map$").__getattr__("MODULE$").empty()
            return bool(self._context._jsc.sc().requestTotalExecutors(executors, 0, empty))

        if not _call_spark("the number of executors could not be changed", want):
            raise TopologyFailed("Spark", f"the master refused a limit of {executors} executors")

    def _scheduler(self) -> Any:
        return self._context._jsc.sc().schedulerBackend()


def _call_spark(problem: str, ask: Callable[[], T]) -> T:
    try:
        return ask()
    except (Py4JError, OSError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise TopologyFailed("Spark", f"{problem} ({lines[0]})") from error
