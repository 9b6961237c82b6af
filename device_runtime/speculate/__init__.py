"""Speculative decoding: trees of drafted tokens, verified in one pass, accepted exactly."""
