"""The benchmarks of ``penstock bench``: microbenchmarks, the papers' experiments, and comparisons with other
systems."""
