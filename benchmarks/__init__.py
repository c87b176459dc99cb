"""Benchmarks: the ladder, the papers' experiments, the peers. Run by ``penstock bench``."""
