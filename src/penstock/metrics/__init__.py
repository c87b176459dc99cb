"""Metrics: tasks count, workers report, and the metrics bus in the driver combines the reports into one view per
component."""
