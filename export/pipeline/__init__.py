"""Export commands from checkpoint to published bundle, and their verification."""
