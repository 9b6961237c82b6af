"""Reports of an evaluation."""
