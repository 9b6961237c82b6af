"""Qwen3 (dense): Llama with normalized queries and keys."""

from __future__ import annotations

import onnx_ir as ir

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.layers.attention import merge_heads, split_heads
from edgellm.export.layers.norm import RMSNorm
from edgellm.export.models import llama
from edgellm.export.models.qwen2 import expect_full_attention
from edgellm.export.onnx.builder import Op

TINY = {**llama.TINY, "model_type": "qwen3", "head_dim": 32}


class Config(DecoderConfig):
    """Qwen3's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        expect_full_attention(reader)
        bias = reader.read("attention_bias", bool, False)
        return cls.read(reader, qkv_bias=bias, o_proj_bias=bias)


class Attention(llama.Attention):
    """Self-attention with an RMS norm per head on queries and keys."""

    norm: type[RMSNorm] = RMSNorm
    names = "q_norm", "k_norm"

    def __init__(
        self, config: DecoderConfig, weights: Weights, input_size: int | None = None
    ) -> None:
        super().__init__(config, weights, input_size)
        self.q_norm, self.k_norm = (
            self.norm(weights / name, config.head_dim, config.rms_norm_eps) for name in self.names
        )

    def normalize(self, op: Op, q: ir.Value, k: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Q and k [1, S, heads*D], normalized over D."""
        q = self.q_norm(op, split_heads(op, q, self.config.head_dim))
        k = self.k_norm(op, split_heads(op, k, self.config.head_dim))
        return merge_heads(op, q), merge_heads(op, k)


class DecoderLayer(llama.DecoderLayer):
    """Llama's block with Qwen3's attention."""

    attention = Attention


class Model(llama.Model):
    """Llama's model with Qwen3's blocks."""

    layer = DecoderLayer
