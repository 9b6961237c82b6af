"""What the benchmarks share: models, processes of other libraries, timing, results."""
