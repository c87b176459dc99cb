"""Building blocks that connectors, replay queues and persistent queues share: files, logs, staging areas,
tables."""
