"""Training methods, one module each, and their networks."""
