"""Turns a topology into stages, workers, tasks and the first route table, by pure functions over inert data."""
