"""Hugging Face checkpoint (or GGUF file) to a portable ONNX bundle, without torch."""
