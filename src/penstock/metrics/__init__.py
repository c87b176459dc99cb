"""One metrics bus: tasks count, workers report, the driver folds reports into a view per component."""
