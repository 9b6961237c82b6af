"""Qwen2, Qwen2.5 and DeepSeek-R1-Distill-Qwen: Llama with biases on q, k and v."""

from __future__ import annotations

from edgellm.contract import UnsupportedModelError
from edgellm.export.config import ConfigReader
from edgellm.export.decoder_config import DecoderConfig
from edgellm.export.models import llama
from edgellm.export.models.llama import Model

__all__ = ["TINY", "Config", "Model"]

TINY = {**llama.TINY, "model_type": "qwen2", "tie_word_embeddings": False}


def expect_full_attention(reader: ConfigReader) -> None:
    """Accept Qwen's window keys only while the window is off, in every layer."""
    reader.expect("use_sliding_window", False)
    for key in ("sliding_window", "max_window_layers"):
        reader.optional(key, int)
    kinds = reader.read("layer_types", list, [])
    if any(kind != "full_attention" for kind in kinds):
        reader.expect("layer_types", ["full_attention", "..."])
    if kinds and len(kinds) != (layers := reader.positive("num_hidden_layers")):
        raise UnsupportedModelError(
            f"config.json: layer_types has {len(kinds)} entries, num_hidden_layers is {layers}",
            hint="correct config.json; --num_layers N exports the first N layers",
        )


class Config(DecoderConfig):
    """Qwen2's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        expect_full_attention(reader)
        return cls.read(reader, qkv_bias=True)
