"""Programs of the project itself, for a clone: the demo, its models, the docs generator."""
