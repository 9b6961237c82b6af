"""Qwen2, Qwen2.5 and DeepSeek-R1-Distill-Qwen: Llama with biases on q, k and v."""

from __future__ import annotations

from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import FULL, check_length
from edgellm.export.config.reader import ConfigReader
from edgellm.export.models import llama
from edgellm.export.models.llama import Model

__all__ = ["TINY", "Config", "Model"]

TINY = {**llama.TINY, "model_type": "qwen2", "tie_word_embeddings": False}


def expect_full_attention(reader: ConfigReader) -> None:
    """Accept Qwen's window keys only if the window is off in all layers."""
    reader.expect("use_sliding_window", False)
    for key in ("sliding_window", "max_window_layers"):
        reader.optional(key, int)
    kinds = reader.read("layer_types", list, [])
    if any(kind != FULL for kind in kinds):
        reader.expect("layer_types", [FULL, "..."])
    if kinds:
        check_length(reader, "layer_types", kinds)


class Config(DecoderConfig):
    """Qwen2's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        expect_full_attention(reader)
        return cls.read(reader, qkv_bias=True)
