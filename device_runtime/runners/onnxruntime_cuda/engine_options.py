"""Options in the manifest of a CUDA engine."""

from __future__ import annotations

MINIMUM_VERSION = "minimum_onnxruntime"  # oldest ONNX Runtime with correct kernels
INT_GEMM = "int_gemm"  # "1": integer GEMMs on tensor cores
