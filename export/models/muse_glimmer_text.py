"""Muse-Glimmer, the language model: normalized embeddings, gated attention, windows, scaled logits.

Queries and keys have norms without weights. Every fourth layer attends to all tokens, without RoPE
(NoPE). Norms after attention and network have an epsilon of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import (
    FULL,
    SLIDING,
    AttentionKind,
    check_length,
    read_layer_types,
    read_window,
    window_of,
)
from edgellm.export.config.reader import REMEDY, ConfigReader
from edgellm.export.config.rope import read_parameters, read_rope
from edgellm.export.layers.attention import merge_heads, split_heads
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.norm import RMSNorm, UnweightedRMSNorm
from edgellm.export.models import gemma2, llama
from edgellm.export.onnx.builder import Op

TINY = {
    **llama.TINY,
    "model_type": "muse_glimmer_text",
    "num_hidden_layers": 5,
    "head_dim": 32,
    "tie_word_embeddings": False,
    "sliding_window": 12,
    "qk_scale_factor": 2.5,
    "output_multiplier": 0.25,
    "final_logit_softcapping": 5.0,
    "post_norm_eps": 1e-3,
}
_INTERVAL = 4  # of layers without windows and RoPE, counted from the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(gemma2.Config):
    """Muse-Glimmer's config."""

    logits_multiplier: float = 1.0  # before the soft cap
    post_norm_eps: float = 1e-8  # of norms after attention and network

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json; those of vision-language models may have few keys."""
        reader.assume(
            vocab_size=202048,
            hidden_size=6656,
            intermediate_size=19968,
            num_hidden_layers=52,
            num_attention_heads=32,
            num_key_value_heads=2,
            head_dim=128,
            rms_norm_eps=1e-5,
            max_position_embeddings=131072,
            sliding_window=2048,
            final_logit_softcapping=20.0,
        )
        bias = reader.read("attention_bias", bool, False)
        factor = _positive(reader, "qk_scale_factor", 3.87)
        config = cls.read(
            reader,
            rope=None,
            activation_key="hidden_activation",
            qkv_bias=bias,
            o_proj_bias=bias,
            normalizes_embeddings=True,
            attention_scale=factor * reader.positive("head_dim") ** -0.5,
            logits_softcap=gemma2.read_cap(reader, "final_logit_softcapping"),
            logits_multiplier=reader.read("output_multiplier", float, 0.19611613513818404),
            post_norm_eps=_positive(reader, "post_norm_eps", 1e-8),
        )
        return config.attending(_read_kinds(reader, config))


def _positive(reader: ConfigReader, key: str, default: float) -> float:
    value = reader.read(key, float, default)
    if value <= 0:
        raise UnsupportedModelError(f"config.json: {key} = {value} is not positive", hint=REMEDY)
    return value


def _read_kinds(reader: ConfigReader, config: DecoderConfig) -> tuple[AttentionKind, ...]:
    """Attention of each layer: its window, and whether it has RoPE."""
    layers = config.num_hidden_layers
    is_global = [(layers - 1 - layer) % _INTERVAL == 0 for layer in range(layers)]
    types = read_layer_types(reader, [FULL if each else SLIDING for each in is_global])
    window = read_window(reader, types)
    has_rope = _read_thetas(reader, is_global)
    rope = read_rope(reader, config.head_dim, config.max_position_embeddings)
    return tuple(
        AttentionKind(rope if rotates else None, window_of(kind, window))
        for kind, rotates in zip(types, has_rope, strict=True)
    )


def _read_thetas(reader: ConfigReader, is_global: list[bool]) -> list[bool]:
    """Whether each layer has RoPE, by `layer_rope_theta`: its base, or 0."""
    outer = reader.read("rope_theta", float, 1e4)
    theta = read_parameters(reader).get("rope_theta")
    theta = outer if theta is None else theta
    found = reader.read("layer_rope_theta", list, [0 if each else theta for each in is_global])
    check_length(reader, "layer_rope_theta", found)
    if other := [each for each in found if each not in (0, theta)]:
        raise UnsupportedModelError(
            f"config.json: layer_rope_theta has {other[0]!r}, but rope_theta is {theta}",
            hint=f"transformers reads only whether it is 0: give 0 or {theta} for each layer",
        )
    return [each != 0 for each in found]


class Attention(llama.Attention):
    """Self-attention with norms of queries and keys, its outputs times the sigmoid of gates."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, input_size: int | None = None
    ) -> None:
        super().__init__(config, weights, input_size)
        width = config.num_attention_heads * config.head_dim
        self.gate_proj = Linear(weights / "gate_proj", config.hidden_size, width, bias=False)
        self.qk_norm = UnweightedRMSNorm(config.head_dim, config.rms_norm_eps)

    def normalize(self, op: Op, q: ir.Value, k: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Q and k [1, S, heads*D], normalized over D."""
        q, k = (self.qk_norm(op, split_heads(op, x, self.config.head_dim)) for x in (q, k))
        return merge_heads(op, q), merge_heads(op, k)

    def gate(self, op: Op, x: ir.Value, y: ir.Value) -> ir.Value:
        """X [1, S, H], y [1, S, heads*D] -> [1, S, heads*D]."""
        return op.Mul(y, op.Sigmoid(self.gate_proj(op, x)))


class DecoderLayer(gemma2.DecoderLayer):
    """Gemma 2's block with such attention."""

    attention = Attention

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        assert isinstance(config, Config)
        for norm in (self.post_attention_layernorm, self.post_feedforward_layernorm):
            norm.epsilon = config.post_norm_eps


class Model(gemma2.Model):
    """Gemma 2's model with such blocks and scaled logits."""

    layer = DecoderLayer
    final_norm = RMSNorm

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.multiplier = config.logits_multiplier

    def head(self, op: Op, x: ir.Value) -> ir.Value:
        """Residual stream [1, R, H] -> logits [1, R, V]."""
        logits = op.Mul(llama.Model.head(self, op, x), op.constant(self.multiplier, op.dtype))
        return self.cap(op, logits)
