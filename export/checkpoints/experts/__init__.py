"""Expert weights of checkpoints, in each layout."""
