"""XOR acking: the lineage of frames, the ledgers of the acker, and the pending table of a spout. No IO."""
