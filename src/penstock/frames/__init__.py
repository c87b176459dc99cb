"""The wire format: many tuples of one stream for one task, as an Arrow batch behind a routing header."""
