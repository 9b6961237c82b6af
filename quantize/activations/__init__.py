"""Activations and gradients of linear layers over the calibration text."""
