"""Phi-3, Phi-4 and Phi-4-mini: Llama with fused projections, partial rotary and longrope."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import RULES, RopeTraits
from edgellm.export.layers.attention import PassState
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.mlp import MLP, FusedGatedMLP
from edgellm.export.models import llama
from edgellm.export.onnx.builder import Op

TINY = {
    **llama.TINY, "model_type": "phi3", "hidden_size": 192, "pad_token_id": 3,
    "original_max_position_embeddings": 64, "sliding_window": 12, "partial_rotary_factor": 0.75,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + 0.1 * index for index in range(12)],
        "long_factor": [2.0 + index for index in range(12)],
    },
}  # fmt: skip
_ROPE = RopeTraits(partial=1.0, rules={kind: RULES[kind] for kind in ("default", "longrope")})


class Config(DecoderConfig):
    """Phi's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.assume(original_max_position_embeddings=4096)
        for key in ("attention_bias", "lm_head_bias", "mlp_bias"):
            reader.expect(key, False)
        for key in ("full_attn_mod", "interpolate_factor"):
            reader.expect(key, 1)
        return cls.read(reader, rope=_ROPE, window=reader.optional("sliding_window", int))


class Attention(llama.Attention):
    """Self-attention with one layer for queries, keys and values."""

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        heads, shared = config.num_attention_heads, config.num_key_value_heads
        self.config = config
        self.sizes = [count * config.head_dim for count in (heads, shared, shared)]
        hidden = config.hidden_size
        self.qkv_proj = Linear(weights / "qkv_proj", hidden, sum(self.sizes), bias=False)
        self.o_proj = Linear(weights / "o_proj", self.sizes[0], hidden, bias=False)

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        sizes = op.constant(np.array(self.sizes, np.int64))
        q, k, v = op.outputs(3, "Split", self.qkv_proj(op, x), sizes, axis=-1)
        return self.o_proj(op, state.attend(layer, q, k, v, self.config.num_attention_heads))


class DecoderLayer(llama.DecoderLayer):
    """Llama's block with fused layers."""

    attention = Attention

    def feed_forward(self, config: DecoderConfig, weights: Weights) -> MLP:
        """MLP with gate and up as one layer."""
        return FusedGatedMLP(
            weights=weights,
            size=config.hidden_size,
            inner_size=config.intermediate_size,
            activation=config.activation,
        )


class Model(llama.Model):
    """Llama's model with Phi's blocks."""

    layer = DecoderLayer
