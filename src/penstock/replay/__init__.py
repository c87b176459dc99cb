"""Replay queues (SPEC 2.5): Eden, From and To above a spout, and dead letters."""
