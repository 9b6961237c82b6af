"""Calibration text, and hidden states on disk."""
