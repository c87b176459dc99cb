"""What connectors, replay queues and persistent queues share to keep data: files, logs, staging, tables."""
