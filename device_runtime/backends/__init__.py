"""Backends, one module each: everything that one inference library needs."""
