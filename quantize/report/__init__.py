"""Reports of a quantization run."""
