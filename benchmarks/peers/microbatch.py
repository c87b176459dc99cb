"""The same word count in plain PySpark Structured Streaming with micro-batches: Python creates and splits the
sentences, Spark counts. Prints one line of JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from benchmarks.words import SENTENCES, sentences
from penstock.spark.java import ensure_java

ROWS_PER_BATCH = 400_000  # sentences; about a second of work, so that the cost of a batch is small


def split(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    pool = pa.array(sentences())
    for batch in batches:
        chosen = pool.take(pa.array(batch.column(0).to_numpy() % SENTENCES))
        yield pa.RecordBatch.from_arrays([pc.split_pattern(chosen, " ").flatten()], names=["word"])


def main() -> None:
    warm_up, seconds = float(sys.argv[1]), float(sys.argv[2])
    ensure_java()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYTHONPATH"] = os.getcwd()
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    source = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", ROWS_PER_BATCH)
        .option("numPartitions", 2)
        .load()
        .select("value")
    )
    counts = source.mapInArrow(split, "word string").groupBy("word").count()
    with tempfile.TemporaryDirectory() as folder:
        query = counts.writeStream.format("noop").outputMode("update").option("checkpointLocation", folder).start()
        time.sleep(warm_up)
        first, begun = _sentences(query), time.monotonic()
        while time.monotonic() - begun < seconds or _sentences(query) == first:
            time.sleep(0.05)
        rate = (_sentences(query) - first) / (time.monotonic() - begun)
        query.stop()
    words = sum(len(sentence.split(" ")) for sentence in sentences()) / SENTENCES
    print(json.dumps({"system": "pyspark micro-batch", "words_per_s": rate * words, "sentences_per_s": rate}))
    spark.stop()


def _sentences(query) -> int:  # type: ignore[no-untyped-def]
    """Sentences in the completed batches; the current batch does not count."""
    last = query.lastProgress
    return 0 if last is None else (last["batchId"] + 1) * ROWS_PER_BATCH


if __name__ == "__main__":
    main()
