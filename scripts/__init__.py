"""Programs for a clone of the repository: the demo, its models, the docs generator."""
