"""Prefix cache: keys of cached positions, pinned prefixes, finished sequences."""
