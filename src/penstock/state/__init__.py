"""The state that survives a process: task state, snapshots and manifests, in any folder that fsspec supports."""
