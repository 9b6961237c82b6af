"""Formats of quantized checkpoints: schemes, layouts, tensors."""
