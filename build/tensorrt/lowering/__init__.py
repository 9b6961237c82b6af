"""Portable graphs as TensorRT's parser and compiler take them."""
