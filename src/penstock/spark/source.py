"""The clock source: a streaming source without rows that keeps the tasks of a query alive.

Real-Time Mode requires a source that supports it. Spouts read their data themselves, so Spark's own in-memory
source is used, which stays empty. It is an internal class of Spark and may change between versions.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession


def clock_source(spark: SparkSession, partitions: int) -> DataFrame:
    """Return a streaming DataFrame with this number of partitions that never has a row."""
    jvm = spark.sparkContext._jvm
    sources = jvm.org.apache.spark.sql.execution.streaming.sources
    stream = sources.LowLatencyMemoryStream.apply(
        spark._jsparkSession, partitions, jvm.org.apache.spark.sql.Encoders.BINARY()
    )
    return DataFrame(stream.toDF(), spark)
