"""``penstock bench peers``: FastWordCount (SPEC 7) beside Apache Storm and plain PySpark micro-batches."""

from benchmarks.peers.bench import main

__all__ = ["main"]
