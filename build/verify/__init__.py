"""Verification of an engine's graphs against the portable graphs."""
