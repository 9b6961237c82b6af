"""LFM3: LFM2 with windows, gates of heads, and norms before and after."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import (
    CONV,
    FULL,
    SLIDING,
    AttentionKind,
    read_layer_types,
    read_window,
    window_of,
)
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import PROPORTIONAL_ROPE, read_ropes
from edgellm.export.layers.attention import PassState, scale_heads
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.norm import RMSNorm
from edgellm.export.models import lfm2, llama, qwen3
from edgellm.export.onnx.builder import Op

TINY = {
    **{key: value for key, value in llama.TINY.items() if key != "rms_norm_eps"},
    "model_type": "lfm3",
    "pad_token_id": 3,
    "norm_eps": 1e-5,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "sliding_window": 12,
    "layer_types": [CONV, SLIDING, FULL, CONV],
}
_ROPES = {
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
_THETA = 1e6  # of rope_parameters without rope_theta


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(lfm2.Config):
    """LFM3's config."""

    has_gates: bool = True  # of attention heads
    has_post_norms: bool = True  # after attention, convolution and MLP

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.assume(
            tie_word_embeddings=True,
            norm_eps=1e-5,
            num_key_value_heads=4,
            head_dim=128,
            max_position_embeddings=128000,
            sliding_window=256,
            conv_L_cache=7,
        )
        bias = reader.read("attention_bias", bool, False)
        config = cls.read(
            reader,
            rope=None,
            epsilon_key="norm_eps",
            qkv_bias=bias,
            o_proj_bias=bias,
            is_recurrent=True,
            conv_size=lfm2.read_conv_size(reader),
            conv_bias=reader.read("conv_bias", bool, False),
            has_gates=reader.read("use_attention_gate", bool, True),
            has_post_norms=reader.read("use_sandwich_norm", bool, True),
        )
        usual = [_usual_type(layer) for layer in range(config.num_hidden_layers)]
        types = read_layer_types(reader, usual, (FULL, SLIDING, CONV))
        window = read_window(reader, types)
        if reader.optional("rope_parameters", dict) is None:
            reader.replace(rope_parameters=_ROPES)
        thetas, size = dict.fromkeys(_ROPES, _THETA), config.head_dim
        longest = config.max_position_embeddings
        ropes = read_ropes(reader, thetas, size, longest, PROPORTIONAL_ROPE)
        return config.attending(
            tuple(
                None if kind == CONV else AttentionKind(ropes[kind], window_of(kind, window))
                for kind in types
            )
        )


def _usual_type(layer: int) -> str:
    if layer % 4 == 2:
        return FULL
    return SLIDING if layer and layer % 4 == 0 else CONV


class Attention(qwen3.Attention):
    """Qwen3's attention, each head times the sigmoid of a gate."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, input_size: int | None = None
    ) -> None:
        super().__init__(config, weights, input_size)
        assert isinstance(config, Config)
        hidden, heads = config.hidden_size, config.num_attention_heads
        gates = weights / "gate_proj"
        self.gate_proj = Linear(gates, hidden, heads, bias=False) if config.has_gates else None

    def gate(self, op: Op, x: ir.Value, y: ir.Value) -> ir.Value:
        """X [1, S, H], y [1, S, heads*D] -> [1, S, heads*D]."""
        if self.gate_proj is None:
            return y
        return scale_heads(op, y, op.Sigmoid(self.gate_proj(op, x)), self.config.head_dim)


class DecoderLayer(lfm2.DecoderLayer):
    """LFM2's block whose branches may be normalized after, too."""

    attention = Attention

    def __init__(self, config: DecoderConfig, weights: Weights, index: int) -> None:
        super().__init__(config, weights, index)
        assert isinstance(config, Config)
        self.post_operator_norm, self.post_ffn_norm = (
            RMSNorm(weights / name, config.hidden_size, config.rms_norm_eps)
            if config.has_post_norms
            else None
            for name in ("post_operator_norm", "post_ffn_norm")
        )

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        y = self.mixer.forward(op, self.operator_norm(op, x), state, layer)
        x = op.Add(x, _normed(op, self.post_operator_norm, y))
        y = self.feed_forward(op, self.ffn_norm(op, x))
        return op.Add(x, _normed(op, self.post_ffn_norm, y))


def _normed(op: Op, norm: RMSNorm | None, y: ir.Value) -> ir.Value:
    return y if norm is None else norm(op, y)


class Model(lfm2.Model):
    """LFM2's model with such blocks."""

    block = DecoderLayer
