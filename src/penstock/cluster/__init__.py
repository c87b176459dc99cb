"""A Spark cluster on one machine, to try things on: each node in a network namespace of its own behind a link of
limited rate. Knows nothing of topologies, and imports no pyspark."""
