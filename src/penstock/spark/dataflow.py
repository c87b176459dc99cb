"""Builds the Spark query of a plan: one ``mapInArrow`` per stage with a streaming shuffle between stages, as one
endless batch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from penstock.spark.source import clock_source
from penstock.spark.stage import StageFunction

FRAME_SCHEMA = "slot int, frame binary"
_ONE_BATCH = "3650 days"
"""Length of a batch. At the end of a batch Spark produces no output for up to a second, so the batch outlasts the
query."""


def start_query(
    spark: SparkSession, slots: Sequence[int], stage: Callable[[int], StageFunction], folder: Path
) -> StreamingQuery:
    """Start the query. ``slots``: number of Spark tasks of each stage. ``folder``: where its checkpoint folder is
    created. Returns at once; each worker connects to the driver when it runs."""
    frame = clock_source(spark, slots[0]).mapInArrow(_by_reference(stage(0)), FRAME_SCHEMA)
    for index in range(1, len(slots)):
        frame = frame.repartitionById(slots[index], frame["slot"])
        frame = frame.mapInArrow(_by_reference(stage(index)), FRAME_SCHEMA)
    # A new checkpoint folder for each query run: Penstock keeps the state that survives a restart, not Spark.
    return (
        frame.writeStream.format("noop")
        .option("checkpointLocation", tempfile.mkdtemp(prefix="checkpoint-", dir=folder))
        .outputMode("update")
        .trigger(realTime=_ONE_BATCH)
        .start()
    )


def _by_reference(
    stage: StageFunction,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """PySpark requires a function. This one refers only to the stage, whose class pickles by reference."""
    return lambda batches: stage(batches)
