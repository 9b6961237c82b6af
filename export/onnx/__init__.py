"""Recorder of ONNX nodes, and model-local functions."""
