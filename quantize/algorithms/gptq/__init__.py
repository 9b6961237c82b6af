"""GPTQ (arXiv 2210.17323): rounding with error feedback."""
