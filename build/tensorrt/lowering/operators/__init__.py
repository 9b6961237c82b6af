"""Experts and recurrent layers in TensorRT's own operators, for a library without plugins."""
