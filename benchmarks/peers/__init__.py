"""``penstock bench peers``: FastWordCount compared with Apache Storm and plain PySpark micro-batches."""

from benchmarks.peers.bench import main

__all__ = ["main"]
