"""`edgellm`: one command from a model to its answers."""
