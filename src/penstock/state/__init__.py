"""What survives the process: task state, snapshots, manifests, on any fsspec path."""
