"""OLMo 2: norms after attention and network, not before, and over all queries and all keys."""

from __future__ import annotations

import onnx_ir as ir

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.layers.attention import PassState
from edgellm.export.layers.norm import RMSNorm
from edgellm.export.models import llama
from edgellm.export.onnx.builder import Op

TINY = {**llama.TINY, "model_type": "olmo2", "tie_word_embeddings": False}


class Config(DecoderConfig):
    """OLMo 2's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        bias = reader.read("attention_bias", bool, False)
        return cls.read(reader, qkv_bias=bias, o_proj_bias=bias)


class Attention(llama.Attention):
    """Self-attention with an RMS norm over all queries, and one over all keys."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, input_size: int | None = None
    ) -> None:
        super().__init__(config, weights, input_size)
        head_dim, epsilon = config.head_dim, config.rms_norm_eps
        self.q_norm = RMSNorm(weights / "q_norm", config.num_attention_heads * head_dim, epsilon)
        self.k_norm = RMSNorm(weights / "k_norm", config.num_key_value_heads * head_dim, epsilon)

    def normalize(self, op: Op, q: ir.Value, k: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Q and k [1, S, heads*D], normalized over all heads."""
        return self.q_norm(op, q), self.k_norm(op, k)


class DecoderLayer(llama.DecoderLayer):
    """Post-norm transformer block."""

    attention = Attention

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.post_feedforward_layernorm = self.norm(
            weights / "post_feedforward_layernorm", config.hidden_size, config.rms_norm_eps
        )

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        attended = self.self_attn.forward(op, x, state, layer)
        x = op.Add(x, self.post_attention_layernorm(op, attended))
        return op.Add(x, self.post_feedforward_layernorm(op, self.mlp(op, x)))


class Model(llama.Model):
    """Llama's model with OLMo's blocks."""

    layer = DecoderLayer
