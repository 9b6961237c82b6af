"""Searches over algorithms, float layers and draft precisions."""
