"""From a topology to stages, workers, tasks and the first route table: pure passes over inert data."""
