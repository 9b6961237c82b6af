"""The model store: engines of models by name, made of checkpoints on disk or on a hub."""
