"""Inside a worker: inboxes, executors, outputs. No pyspark, no sockets, no thread of its own: the Spark side and
the local runner of ``penstock.testing`` drive the very same code."""
