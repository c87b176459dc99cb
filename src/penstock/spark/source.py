"""The clock source: a source without rows that keeps a query's tasks alive.

Real-Time Mode needs a source that supports it. Spark's own in-memory one does; spouts read their data
themselves. This is the one internal class of Spark's that Penstock touches.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession


def clock_source(spark: SparkSession, partitions: int) -> DataFrame:
    """A streaming DataFrame of so many partitions that never has a row."""
    jvm = spark.sparkContext._jvm
    sources = jvm.org.apache.spark.sql.execution.streaming.sources
    stream = sources.LowLatencyMemoryStream.apply(
        spark._jsparkSession, partitions, jvm.org.apache.spark.sql.Encoders.BINARY()
    )
    return DataFrame(stream.toDF(), spark)
