"""Mixed precision: which layers get how many bits."""
