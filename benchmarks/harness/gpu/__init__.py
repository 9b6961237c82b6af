"""Measurements of GPUs that `gpu.py`, `proof.py` and the tests share."""
