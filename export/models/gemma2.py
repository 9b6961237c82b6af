"""Gemma 2: scaled embeddings, norms before and after, windows in turn, soft caps."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import (
    AttentionKind,
    every,
    read_layer_types,
    read_window,
    window_of,
)
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import read_rope
from edgellm.export.layers.attention import PassState
from edgellm.export.layers.norm import ShiftedRMSNorm
from edgellm.export.models import llama
from edgellm.export.onnx.builder import Op

ACTIVATION = "gelu_pytorch_tanh"
TINY = {
    **llama.TINY, "model_type": "gemma2", "head_dim": 32, "hidden_activation": ACTIVATION,
    "sliding_window": 12, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 5.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(DecoderConfig):
    """Gemma's config."""

    logits_softcap: float | None = None  # soft cap of logits

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.assume(
            head_dim=256,
            hidden_activation=ACTIVATION,
            sliding_window=4096,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
        )
        reader.expect("use_bidirectional_attention", False)
        config = cls.gemma(reader, read_cap(reader, "attn_logit_softcapping"))
        types = read_layer_types(reader, every(2, config.num_hidden_layers))
        window = read_window(reader, types)
        rope = read_rope(reader, config.head_dim, config.max_position_embeddings)
        return config.attending(
            tuple(AttentionKind(rope, window_of(kind, window)) for kind in types)
        )

    @classmethod
    def gemma(cls, reader: ConfigReader, softcap: float | None) -> DecoderConfig:
        """Facts that Gemma 2 and 3 share, without layer types."""
        reader.assume(tie_word_embeddings=True, query_pre_attn_scalar=256)
        is_causal = not reader.read("use_bidirectional_attention", bool, False)
        bias = reader.read("attention_bias", bool, False)
        scalar = reader.nonzero("query_pre_attn_scalar", 256.0)
        if scalar < 0:
            raise UnsupportedModelError(f"config.json: query_pre_attn_scalar = {scalar}")
        config = cls.read(
            reader, rope=None, activation_key="hidden_activation", qkv_bias=bias, o_proj_bias=bias,
            embedding_scale=reader.positive("hidden_size") ** 0.5, attention_scale=scalar**-0.5,
            logits_softcap=read_cap(reader, "final_logit_softcapping"), attention_softcap=softcap,
            is_causal=is_causal,
        )  # fmt: skip
        reader.expect("hidden_act", config.activation)  # its first name
        return config


def read_cap(reader: ConfigReader, key: str) -> float | None:
    """A soft cap, a positive number; None without a cap."""
    cap = reader.optional(key, float)
    if cap is not None and cap <= 0:
        raise UnsupportedModelError(f"config.json: {key} = {cap} is not positive")
    return cap


class DecoderLayer(llama.DecoderLayer):
    """Transformer block whose branches are normalized before and after."""

    norm = ShiftedRMSNorm

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = (
            self.norm(weights / name, config.hidden_size, config.rms_norm_eps)
            for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm")
        )

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        attended = self.self_attn.forward(op, self.input_layernorm(op, x), state, layer)
        x = op.Add(x, self.post_attention_layernorm(op, attended))
        y = self.mlp(op, self.pre_feedforward_layernorm(op, x))
        return op.Add(x, self.post_feedforward_layernorm(op, y))


class Model(llama.Model):
    """Llama's model with Gemma's blocks and soft-capped logits."""

    layer = DecoderLayer
    final_norm = ShiftedRMSNorm

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.softcap = config.logits_softcap

    def head(self, op: Op, x: ir.Value) -> ir.Value:
        """Residual stream [1, R, H] -> logits [1, R, V]."""
        return self.cap(op, super().head(op, x))

    def cap(self, op: Op, logits: ir.Value) -> ir.Value:
        """Soft-capped logits, any shape."""
        if self.softcap is None:
            return logits
        bound = op.constant(self.softcap, op.dtype)
        return op.Mul(op.Tanh(op.Div(logits, bound)), bound)
