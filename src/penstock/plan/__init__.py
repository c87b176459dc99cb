"""From a topology to stages, slots, tasks and the first route table: pure passes over inert data."""
