"""Speculation rounds that a GPU runs without the host."""
