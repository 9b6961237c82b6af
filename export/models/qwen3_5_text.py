"""Qwen3.5, the language model: three layers of gated delta nets to one of gated attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from edgellm.core.graph_io import ROWS
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import FULL, LINEAR, AttentionKind, read_layer_types
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import Rope, RopeTraits, read_parameters, rope_of
from edgellm.export.layers.attention import PassState, merge_heads, split_heads
from edgellm.export.layers.delta import DeltaRule, DeltaSizes
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.norm import RMSNorm, ShiftedRMSNorm
from edgellm.export.models import llama, qwen2_moe, qwen3
from edgellm.export.onnx.builder import Op

TINY = {
    **llama.TINY,
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "head_dim": 32,
    "tie_word_embeddings": False,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
# Of an unread config.
_NO_SIZES = DeltaSizes(key_heads=1, value_heads=1, key_dim=1, value_dim=1, window=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(qwen2_moe.Config):
    """The config of a Qwen with linear attention, with or without experts."""

    delta: DeltaSizes = _NO_SIZES

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        return cls.hybrid(reader)

    @classmethod
    def hybrid(cls, reader: ConfigReader, **traits: Any) -> DecoderConfig:
        """Facts that all hybrid Qwens share; `traits` are their own."""
        # Keys of the MTP layer, which is exported as a draft.
        mtp = "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "num_nextn_predict_layers"
        reader.skip(*mtp)
        reader.expect("attn_output_gate", True)
        reader.expect("mamba_ssm_dtype", "float32")
        reader.expect("hidden_act", "silu", "swish")
        reader.assume(head_dim=256, rms_norm_eps=1e-6, max_position_embeddings=32768)
        bias = reader.read("attention_bias", bool, False)
        config = cls.read(
            reader,
            rope=None,
            qkv_bias=bias,
            o_proj_bias=bias,
            is_recurrent=True,
            delta=DeltaSizes.read(reader),
            **traits,
        )
        attends = AttentionKind(_read_rope(reader, config))
        types = _layer_types(reader, config.num_hidden_layers)
        return config.attending(tuple(attends if kind == FULL else None for kind in types))


def _read_rope(reader: ConfigReader, config: DecoderConfig) -> Rope:
    """RoPE of a quarter of a head's numbers, if the config says nothing else."""
    parameters = read_parameters(reader)
    theta = reader.read("rope_theta", float, 1e4)
    parameters["rope_theta"] = parameters.get("rope_theta") or theta
    traits = RopeTraits(partial=0.25)
    return rope_of(reader, parameters, config.head_dim, config.max_position_embeddings, traits)


def _layer_types(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    interval = reader.positive("full_attention_interval", 4)
    usual = [FULL if (at + 1) % interval == 0 else LINEAR for at in range(layers)]
    return read_layer_types(reader, usual, (FULL, LINEAR))


class Attention(qwen3.Attention):
    """Self-attention times the sigmoid of a gate, from the queries' projection."""

    norm = ShiftedRMSNorm

    def __init__(
        self, config: DecoderConfig, weights: Weights, input_size: int | None = None
    ) -> None:
        super().__init__(config, weights, input_size)
        size = 2 * config.num_attention_heads * config.head_dim
        self.q_proj = Linear(weights / "q_proj", config.hidden_size, size, bias=config.qkv_bias)

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        both = split_heads(op, self.q_proj(op, x), 2 * self.config.head_dim)
        q, gate = (
            merge_heads(op, each) for each in op.outputs(2, "Split", both, axis=-1, num_outputs=2)
        )
        k, v = self.k_proj(op, x), self.v_proj(op, x)
        q, k = self.normalize(op, q, k)
        y = self.attend(op, state, layer, q, k, v)
        return self.o_proj(op, op.Mul(y, op.Sigmoid(gate)))


class GatedDeltaNet:
    """Gated delta net with projections, norm and output gate."""

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        assert isinstance(config, Config)
        self.sizes = sizes = config.delta
        hidden = config.hidden_size
        self.rule = DeltaRule(sizes, weights, ROWS)
        self.project(config, weights)
        self.norm = RMSNorm(weights / "norm", sizes.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(weights / "out_proj", sizes.values, hidden, bias=False)

    def project(self, config: DecoderConfig, weights: Weights) -> None:
        """Make the input projections."""
        for name, size in (
            ("qkv", self.sizes.convolved),
            ("z", self.sizes.values),
            ("a", self.sizes.value_heads),
            ("b", self.sizes.value_heads),
        ):
            layer = Linear(weights / f"in_proj_{name}", config.hidden_size, size, bias=False)
            setattr(self, f"in_proj_{name}", layer)

    def projected(self, op: Op, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
        """Queries, keys and values, concatenated; gates z, a and b."""
        return tuple(getattr(self, f"in_proj_{name}")(op, x) for name in ("qkv", "z", "a", "b"))  # type: ignore[return-value]

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        mixed, z, a, b = self.projected(op, x)
        y = split_heads(op, self.rule(op, mixed, a, b, state, layer), self.sizes.value_dim)
        normed = merge_heads(op, self.norm(op, y))
        return self.out_proj(op, op.Mul(normed, op.Swish(z)))


class DecoderLayer(llama.DecoderLayer):
    """Pre-norm block of attention."""

    attention = Attention
    norm = ShiftedRMSNorm


class LinearLayer(DecoderLayer):
    """Pre-norm block of a gated delta net."""

    attention = GatedDeltaNet  # type: ignore[assignment]
    attention_name = "linear_attn"


class Model(llama.Model):
    """Llama's model with such blocks."""

    final_norm = ShiftedRMSNorm
    layers_of: tuple[type[llama.DecoderLayer], type[llama.DecoderLayer]] = LinearLayer, DecoderLayer

    def make_layer(self, config: DecoderConfig, weights: Weights, index: int) -> llama.Layer:
        """A block of the layer's type."""
        return self.layers_of[config.kinds[index] is not None](config, weights)
