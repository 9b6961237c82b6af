"""KV cache of an engine: sequences, prefix cache, snapshots on disk."""
