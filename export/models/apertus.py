"""Apertus: norms of queries and keys, and a plain feed-forward network with xIELU."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import RopeTraits
from edgellm.export.layers.activations import softplus
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.mlp import MLP
from edgellm.export.layers.recurrent import floats
from edgellm.export.models import llama, qwen3
from edgellm.export.onnx.builder import Op

TINY = {
    **llama.TINY,
    "model_type": "apertus",
    "hidden_act": "xielu",
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
_THETA = 1.2e7
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": _THETA,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class Config(DecoderConfig):
    """Apertus's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.expect("qk_norm", True)
        bias = reader.read("attention_bias", bool, False)
        if not any(reader.optional(key, dict) for key in ("rope_parameters", "rope_scaling")):
            _assume_rope(reader)
        rope = RopeTraits(theta=_THETA)
        return cls.read(reader, rope=rope, activations=("xielu",), qkv_bias=bias, o_proj_bias=bias)


def _assume_rope(reader: ConfigReader) -> None:
    """Set the default of configs without rope_parameters; with an empty one, RoPE is plain."""
    if reader.optional("rope_parameters", dict) is None:
        reader.expect("rope_theta", _THETA)  # transformers ignores another one
        reader.replace(rope_parameters=_ROPE)


class XIELU:
    """The activation xIELU (arXiv 2411.13010), whose factors are trained; in float32.

    `a x^2 + beta x` for positive x, else `(beta + b) (exp(min(x, eps)) - 1 - x) + beta x`, where a
    and b are the softplus of `alpha_p` and `alpha_n`.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the activation; x of any shape."""
        with op.scope(self.weights.prefix.rstrip(".")):
            rows = floats(op, x)
            a, b = (softplus(op, self._number(op, f"alpha_{sign}", (1,))) for sign in "pn")
            beta, eps = (self._number(op, name, ()) for name in ("beta", "eps"))
            one, zero = (op.constant(np.float32(number)) for number in (1, 0))
            bent = op.Sub(op.Sub(op.Exp(op.Min(rows, eps)), one), rows)
            bent = op.Mul(op.Add(beta, b), bent)
            curve = op.Where(op.Greater(rows, zero), op.Mul(a, op.Mul(rows, rows)), bent)
            y = op.Add(curve, op.Mul(beta, rows))
            return y if op.dtype == ir.DataType.FLOAT else op.Cast(y, to=int(op.dtype))

    def _number(self, op: Op, name: str, shape: tuple[int, ...]) -> ir.Value:
        float32 = ir.DataType.FLOAT
        return op.cast(op.parameter(self.weights.take(name, shape, float32)), float32)


class FeedForward:
    """`down_proj(xielu(up_proj(x)))`."""

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.up_proj = Linear(weights / "up_proj", hidden, inner, bias=False)
        self.act_fn = XIELU(weights / "act_fn")
        self.down_proj = Linear(weights / "down_proj", inner, hidden, bias=False)

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the network; x [1, S, H] -> [1, S, H]."""
        return self.down_proj(op, self.act_fn(op, self.up_proj(op, x)))


class DecoderLayer(llama.DecoderLayer):
    """Llama's block with Qwen3's attention and such a network."""

    attention = qwen3.Attention
    norm_names = "attention_layernorm", "feedforward_layernorm"

    def feed_forward(self, config: DecoderConfig, weights: Weights) -> MLP:
        """The network after attention."""
        return FeedForward(config, weights)


class Model(llama.Model):
    """Llama's model with such blocks."""

    layer = DecoderLayer
