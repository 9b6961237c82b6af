"""Lowering to edgellm's own CPU kernels, and packing of their weights."""
