"""Lowering of portable graphs for TensorRT's parser and compiler."""
