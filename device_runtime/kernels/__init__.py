"""Kernels of our own, by the language that they are written in."""
