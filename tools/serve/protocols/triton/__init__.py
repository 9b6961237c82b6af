"""Triton's generate extension."""
