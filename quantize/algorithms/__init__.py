"""Algorithms that turn float weights into quantized weights."""
