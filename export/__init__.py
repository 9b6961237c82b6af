"""Hugging Face checkpoint (or GGUF file) to a portable ONNX bundle, without torch."""

import edgellm.core  # noqa: F401 - it switches off the telemetry of libraries
