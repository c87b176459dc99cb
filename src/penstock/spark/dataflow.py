"""A plan as a Spark query: one ``mapInArrow`` per stage, a streaming shuffle between them, one long batch."""

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
_ONE_BATCH = "3650 days"  # Spark's own batch boundary costs up to a second without output: have none


def start_query(
    spark: SparkSession, slots: Sequence[int], stage: Callable[[int], StageFunction], folder: Path
) -> StreamingQuery:
    """Start the query, with so many tasks in each stage. Returns at once; the workers say for themselves when they
    run."""
    frame = clock_source(spark, slots[0]).mapInArrow(_by_reference(stage(0)), FRAME_SCHEMA)
    for index in range(1, len(slots)):
        frame = frame.repartitionById(slots[index], frame["slot"])
        frame = frame.mapInArrow(_by_reference(stage(index)), FRAME_SCHEMA)
    # A fresh checkpoint folder each time: what must survive a restart is in our own hands, not in Spark's.
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
    """PySpark wants a function; this one holds nothing but the stage, which pickles by reference."""
    return lambda batches: stage(batches)
