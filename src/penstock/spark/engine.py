"""Spark as the engine of the driver: queries in Real-Time Mode, task slots, executors as nodes."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from penstock.driver.engine import QueryLaunch, Shortage
from penstock.redaction import redacted
from penstock.spark import capacity, exits, pickling, shipping
from penstock.spark.capacity import NodeWait
from penstock.spark.dataflow import start_query
from penstock.spark.nodes import nodes_of
from penstock.spark.session import exposure, is_local, log_lines, session_folder, total_slots
from penstock.spark.stage import StageFunction

log = logging.getLogger("penstock.spark")

# Matches a line that names a cause: a Python error, the root cause of a Java error, or a lost worker.
_CAUSE = re.compile(r"\s*([\w.]+(Error|Exception): |Caused by: |.*(crashed|exited unexpectedly|ExecutorLost))")

_last_shipped: dict[str, Path] = {}
"""By Spark application: the user's modules that were shipped last. Workers of all its topologies import them."""
_copies = itertools.count(1)


class SparkQuery:
    """A streaming query. Implements ``driver.engine.Query``."""

    def __init__(self, query: StreamingQuery) -> None:
        self._query = query

    def is_active(self) -> bool:
        return bool(self._query.isActive)

    def why_ended(self) -> str:
        error = self._query.exception()
        if error is None:
            return "the query ended"
        lines = str(error).splitlines() or log_lines()[-1:] or ["the query ended"]
        causes = [line.strip() for line in lines if _CAUSE.match(line)]
        return redacted((causes or lines)[0])[:300]

    def stop(self) -> None:
        try:
            self._query.stop()
        except Exception as error:  # the query may have failed in any way, and the JVM may have died
            log.debug("stopping a query: %s", error)


class SparkEngine:
    """Implements ``driver.engine.Engine`` on one Spark session."""

    def __init__(self, spark: SparkSession) -> None:
        self.spark = spark
        self._nodes = nodes_of(spark)
        self._wait: NodeWait | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="queries-", dir=session_folder()))
        self._has_penstock = is_local(spark.sparkContext.master)

    # ---- task slots ------------------------------------------------------------------------------------

    def nodes_settled(self) -> bool:
        if self._wait is None:
            self._wait = NodeWait(self.spark)
        settled = self._wait.over()
        if settled:
            self._wait = None
        return settled

    def reserve(self, holder: int, slots: int, elsewhere: int = 0) -> Shortage | None:
        self._wait = None
        return capacity.reserve(self.spark, holder, slots, elsewhere)

    def free(self, holder: int) -> None:
        capacity.release(holder)

    def free_slots(self) -> int:
        return capacity.free(self.spark)

    def total(self) -> int:
        return total_slots(self.spark)

    def cores(self) -> int:
        return capacity.cores(self.spark)

    def shared_with_others(self, holders: Collection[int]) -> bool:
        return not capacity.alone(holders)

    # ---- queries ---------------------------------------------------------------------------------------

    def launch(self, launch: QueryLaunch) -> SparkQuery:
        self._ship(launch)

        def stage(index: int) -> StageFunction:
            return StageFunction(index, launch.job, launch.address, launch.secret, launch.attempt, launch.placed)

        return SparkQuery(start_query(self.spark, launch.slots, stage, self._folder))

    def _ship(self, launch: QueryLaunch) -> None:
        """Ship Penstock to nodes that may not have it, and the user's modules if they differ from those shipped
        last. Workers import from the file that was added last, so each form of a topology finds its own
        modules."""
        context = self.spark.sparkContext
        if not self._has_penstock:
            self._has_penstock = True
            context.addPyFile(str(shipping.penstock_zip(session_folder())))
        modules = launch.modules
        application = str(context.applicationId)
        if modules is not None and modules != _last_shipped.get(application):
            _last_shipped[application] = modules
            # Spark keeps one file per name, so each copy has a name of its own. Spark also keeps its list of files
            # until the session ends, so the copies are not removed before.
            copy = modules.with_stem(f"{modules.stem}-{next(_copies)}")
            shutil.copy(modules, copy)
            context.addPyFile(str(copy))

    def exit_status(self, pid: int, patience: float) -> int | None:
        return exits.exit_status(pid, patience)

    # ---- nodes -----------------------------------------------------------------------------------------

    def nodes(self) -> list[str]:
        return self._nodes.names()

    @property
    def nodes_away(self) -> int:
        return self._nodes.away

    def can_release_nodes(self) -> bool:
        return self._nodes.can_release()

    def release_nodes(self, nodes: Collection[str]) -> None:
        self._nodes.release(nodes)

    def take_nodes_back(self) -> None:
        self._nodes.request_back()

    # ---- the rest --------------------------------------------------------------------------------------

    def pickle(self, value: Any) -> bytes:
        data: bytes = pickling.dumps(value)
        return data

    def user_modules(self) -> Path | None:
        return shipping.user_zip(session_folder())

    def warning(self) -> str:
        return exposure(self.spark)

    def last_log_lines(self) -> str:
        return " / ".join(log_lines()[-3:])

    def close(self) -> None:
        with contextlib.suppress(Exception):  # if the JVM has died, py4j may raise anything
            self._nodes.request_back()
        shutil.rmtree(self._folder, ignore_errors=True)
