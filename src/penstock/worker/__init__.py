"""The worker: inboxes, executors and outputs of the tasks of one process. The package imports neither pyspark
nor sockets, so that Spark tasks and the local runner of ``penstock.testing`` run the same code."""
