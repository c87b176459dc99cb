"""A Spark cluster on one machine, for tests and experiments. Each node runs in its own network namespace behind a
link of limited rate. The package does not depend on topologies and does not import pyspark."""
