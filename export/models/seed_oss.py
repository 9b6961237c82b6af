"""Seed-OSS: Llama with configurable biases."""

from __future__ import annotations

from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.models import llama
from edgellm.export.models.llama import Model

__all__ = ["TINY", "Config", "Model"]

TINY = {**llama.TINY, "model_type": "seed_oss", "head_dim": 32, "tie_word_embeddings": False}


class Config(DecoderConfig):
    """Seed-OSS's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.assume(head_dim=128)
        return cls.read(
            reader,
            qkv_bias=reader.read("attention_bias", bool, True),
            o_proj_bias=reader.read("attention_out_bias", bool, False),
            mlp_bias=reader.read("mlp_bias", bool, False),
        )
