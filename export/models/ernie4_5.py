"""ERNIE 4.5, dense: Llama with interleaved RoPE."""

from __future__ import annotations

from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import RopeTraits
from edgellm.export.models import llama
from edgellm.export.models.llama import Model

__all__ = ["TINY", "Config", "Model"]

TINY = {**llama.TINY, "model_type": "ernie4_5", "head_dim": 32}
ROPE = RopeTraits(theta=5e5, interleaved=True)


class Config(DecoderConfig):
    """ERNIE's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.assume(tie_word_embeddings=True, head_dim=128)
        bias = reader.read("use_bias", bool, False)
        return cls.read(reader, rope=ROPE, qkv_bias=bias, o_proj_bias=bias, mlp_bias=bias)
