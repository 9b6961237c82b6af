"""CUDA calls and small kernels of the TensorRT runner."""
