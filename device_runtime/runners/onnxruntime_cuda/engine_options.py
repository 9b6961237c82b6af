"""Options that the manifest of a CUDA engine holds."""

from __future__ import annotations

MINIMUM_VERSION = "minimum_onnxruntime"  # oldest ONNX Runtime whose kernels are right
INT_GEMM = "int_gemm"  # "1": integer GEMMs on tensor cores
