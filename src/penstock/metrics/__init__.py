"""One metrics bus: tasks count, slots report, the driver folds reports into a view per component."""
