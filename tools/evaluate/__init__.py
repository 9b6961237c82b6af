"""`edgellm-eval`: evaluates an engine on datasets, with and without speculation."""
