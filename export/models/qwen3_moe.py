"""Qwen3-30B-A3B, Qwen3-Coder and Qwen3-235B-A22B: Qwen3 with experts."""

from __future__ import annotations

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.layers.mlp import MLP
from edgellm.export.models import llama, qwen2_moe, qwen3
from edgellm.export.models.qwen2 import expect_full_attention
from edgellm.export.models.qwen2_moe import read_mixture

TINY = {
    **llama.TINY, "model_type": "qwen3_moe", "tie_word_embeddings": False, "head_dim": 32,
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}  # fmt: skip


class Config(qwen2_moe.Config):
    """Qwen3's config with experts."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        expect_full_attention(reader)
        bias = reader.read("attention_bias", bool, False)
        return cls.read(reader, qkv_bias=bias, o_proj_bias=bias, **read_mixture(reader))


class DecoderLayer(qwen2_moe.DecoderLayer):
    """Llama's block with Qwen3's attention and experts."""

    attention = qwen3.Attention

    def shared(self, config: qwen2_moe.Config, weights: Weights) -> MLP | None:
        """No shared expert."""
        del config, weights
        return None


class Model(llama.Model):
    """Llama's model with Qwen3's blocks."""

    layer = DecoderLayer
