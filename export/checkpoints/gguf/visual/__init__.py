"""Visual encoders of GGUF models."""
