"""XOR acking: lineages of frames, the ledger of an acker, the pending table of a spout. No IO."""
