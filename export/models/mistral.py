"""Mistral 7B (all versions, with and without the sliding window) and Mistral Nemo."""

from __future__ import annotations

from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.models import llama
from edgellm.export.models.llama import Model

__all__ = ["TINY", "Config", "Model"]

TINY = {**llama.TINY, "model_type": "mistral", "head_dim": 32, "sliding_window": 12}


class Config(DecoderConfig):
    """Mistral's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        return cls.read(reader, window=reader.optional("sliding_window", int))
