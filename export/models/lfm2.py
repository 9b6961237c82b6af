"""LFM2: gated short convolutions, and attention with normalized queries and keys in some layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from edgellm.core.errors import UnsupportedModelError
from edgellm.core.graph_io import ROWS
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import CONV, FULL, AttentionKind, read_layer_types
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import RopeTraits, read_rope
from edgellm.export.layers.attention import PassState
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.mlp import MLP, GatedMLP
from edgellm.export.layers.norm import RMSNorm
from edgellm.export.layers.recurrent import convolve
from edgellm.export.models import llama, qwen3
from edgellm.export.onnx.builder import Op

TINY = {
    **{key: value for key, value in llama.TINY.items() if key != "rms_norm_eps"},
    "model_type": "lfm2",
    "norm_eps": 1e-5,
    "num_hidden_layers": 4,
    "full_attn_idxs": [1],
    "block_auto_adjust_ff_dim": False,
}
# Keys of the training tool, and initialization.
_UNREAD = (
    "block_mlp_init_scale",
    "block_out_init_scale",
    "block_use_xavier_init",
    "conv_use_xavier_init",
    "num_heads",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(DecoderConfig):
    """LFM2's config."""

    conv_size: int = 3  # kernel size of a convolution
    conv_bias: bool = False

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json, with keys of transformers or of the original release."""
        reader.skip(*_UNREAD)
        reader.assume(
            tie_word_embeddings=reader.read("tie_embedding", bool, True),
            norm_eps=1e-5,
            max_position_embeddings=128000,
            vocab_size=65536,
        )
        if (inner := reader.optional("block_ff_dim", int)) is not None:
            reader.replace(intermediate_size=inner)
        reader.expect("block_use_swiglu", True)
        reader.expect("use_pos_enc", True)
        hidden = reader.positive("hidden_size")
        for key in ("block_dim", "conv_dim", "conv_dim_out"):
            reader.expect(key, hidden)
        reader.replace(intermediate_size=_inner_size(reader))
        reader.expect("block_norm_eps", reader.read("norm_eps", float))
        return cls.convolving(reader)

    @classmethod
    def convolving(cls, reader: ConfigReader, **traits: Any) -> DecoderConfig:
        """Facts that all LFM2 models share; `traits` are their own."""
        config = cls.read(
            reader,
            rope=None,
            epsilon_key="norm_eps",
            is_recurrent=True,
            conv_size=read_conv_size(reader),
            conv_bias=reader.read("conv_bias", bool, False),
            **traits,
        )
        rope = read_rope(
            reader, config.head_dim, config.max_position_embeddings, RopeTraits(theta=1e6)
        )
        attends = AttentionKind(rope)
        types = _layer_types(reader, config.num_hidden_layers)
        return config.attending(tuple(attends if kind == FULL else None for kind in types))


def read_conv_size(reader: ConfigReader) -> int:
    """Kernel size of the convolutions, at least 2."""
    size = reader.positive("conv_L_cache", 3)
    if size < 2:
        raise UnsupportedModelError(f"config.json: conv_L_cache = {size}: nothing to convolve")
    return size


def _inner_size(reader: ConfigReader) -> int:
    """The intermediate size, which may be two thirds of the config's value, rounded up."""
    size = reader.positive("intermediate_size", 12288)
    adjusts = reader.read("block_auto_adjust_ff_dim", bool, True)
    multiplier = reader.read("block_ffn_dim_multiplier", float, 1.0)
    step = reader.positive("block_multiple_of", 256)
    if not adjusts:
        return size
    return -(-int(multiplier * int(2 * size / 3)) // step) * step


def _layer_types(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    attending = reader.read("full_attn_idxs", list, [*range(layers)])
    usual = [FULL if at in attending else CONV for at in range(layers)]
    return read_layer_types(reader, usual, (FULL, CONV))


class Attention(qwen3.Attention):
    """Qwen3's attention with other names."""

    names = "q_layernorm", "k_layernorm"
    output_name = "out_proj"


class ShortConvolution:
    """`out_proj(c * convolve(b * x))` of three projections."""

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        assert isinstance(config, Config)
        hidden, bias = config.hidden_size, config.conv_bias
        self.config, self.conv = config, weights / "conv"
        self.in_proj = Linear(weights / "in_proj", hidden, 3 * hidden, bias=bias)
        self.out_proj = Linear(weights / "out_proj", hidden, hidden, bias=bias)

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        hidden, size = self.config.hidden_size, self.config.conv_size
        sizes = op.constant(np.full(3, hidden, np.int64))
        b, c, x = op.outputs(3, "Split", self.in_proj(op, x), sizes, axis=-1)
        weight = self._parameter(op, "weight", (hidden, 1, size))
        assert state.recurrences is not None
        y = convolve(state.recurrences, layer, op.Mul(b, x), weight, size, ROWS)
        if self.config.conv_bias:
            y = op.Add(y, self._parameter(op, "bias", (hidden,)))
        return self.out_proj(op, op.Mul(c, y))

    def _parameter(self, op: Op, name: str, shape: tuple[int, ...]) -> ir.Value:
        value = op.cast(op.parameter(self.conv.take(name, shape, op.dtype)), op.dtype)
        value.shape, value.type = ir.Shape(shape), ir.TensorType(op.dtype)
        return value


class DecoderLayer:
    """Pre-norm block of attention or convolution."""

    attention: type[llama.Attention] = Attention

    def __init__(self, config: DecoderConfig, weights: Weights, index: int) -> None:
        hidden, epsilon = config.hidden_size, config.rms_norm_eps
        self.operator_norm = RMSNorm(weights / "operator_norm", hidden, epsilon)
        self.mixer = (
            self.attention(config, weights / "self_attn")
            if config.kinds[index] is not None
            else ShortConvolution(config, weights / "conv")
        )
        self.ffn_norm = RMSNorm(weights / "ffn_norm", hidden, epsilon)
        self.feed_forward = self.network(config, weights / "feed_forward", index)

    def network(self, config: DecoderConfig, weights: Weights, index: int) -> MLP:
        """The one after."""
        del index
        names = "w1", "w3", "w2"
        return GatedMLP(
            weights=weights,
            size=config.hidden_size,
            inner_size=config.intermediate_size,
            bias=False,
            names=names,
        )

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        x = op.Add(x, self.mixer.forward(op, self.operator_norm(op, x), state, layer))
        return op.Add(x, self.feed_forward(op, self.ffn_norm(op, x)))


class Model(llama.Model):
    """Llama's model with such blocks."""

    norm_name = "embedding_norm"
    block = DecoderLayer

    def make_layer(self, config: DecoderConfig, weights: Weights, index: int) -> DecoderLayer:
        """A block of the layer's type."""
        return self.block(config, weights, index)
