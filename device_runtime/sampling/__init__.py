"""Sampling: temperature, top-k, top-p, penalties, guided decoding, log-probabilities."""
