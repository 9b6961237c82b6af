"""Formats of quantized checkpoints, read and written."""
