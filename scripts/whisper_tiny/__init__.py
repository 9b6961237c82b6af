"""Whisper tiny.en (MIT), and speech for it, from Python packages: without a model hub."""
