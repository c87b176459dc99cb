"""The wire format of data: a frame contains many tuples of one stream for one task, as a header and an Arrow
batch."""
