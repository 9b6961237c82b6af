"""Quantized checkpoints: the on-disk formats that `export` reads."""
