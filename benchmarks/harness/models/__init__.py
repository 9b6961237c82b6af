"""Checkpoints, bundles and engines of the benchmarks, made once."""
