"""Model-local ONNX functions with plain bodies, which backends replace by their kernels."""
