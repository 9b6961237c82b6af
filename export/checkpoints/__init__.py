"""Checkpoints on disk: Hugging Face folders, torch files, GGUF files, quantized weights."""
