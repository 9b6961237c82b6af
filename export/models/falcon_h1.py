"""Falcon-H1: attention and Mamba 2 in parallel in every layer, and factors on all branches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.core.errors import UnsupportedModelError
from edgellm.core.graph_io import ROWS
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.layers.activations import activate
from edgellm.export.layers.attention import PassState
from edgellm.export.layers.mamba import NO_MAMBA, Mamba2, MambaSizes
from edgellm.export.layers.mlp import GatedMLP
from edgellm.export.layers.norm import RMSNorm
from edgellm.export.models import llama
from edgellm.export.onnx.builder import Op

TINY = {
    **llama.TINY,
    "model_type": "falcon_h1",
    "mamba_d_ssm": 64,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.7,
    "key_multiplier": 0.6,
    "mlp_multipliers": [0.9, 1.2],
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.4,
    "ssm_multipliers": [0.9, 0.8, 1.1, 1.2, 0.7],
}
# Keys for training, and of the training tool.
_UNREAD = (
    "mlp_expansion_factor",
    "num_logits_to_keep",
    "time_step_floor",
    "time_step_max",
    "time_step_min",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Factors of inputs and outputs of a layer's parts."""

    attention_in: float
    attention_out: float
    key: float
    ssm_in: float
    ssm_out: float
    gate: float  # before the activation
    down: float
    # Of Mamba's gates, its convolved x, B and C, and dt.
    ssm: tuple[float, ...]

    @classmethod
    def read(cls, reader: ConfigReader) -> Multipliers:
        """Read the factors; raises `UnsupportedModelError` unless they are numbers."""
        names = "attention_in", "attention_out", "key", "ssm_in", "ssm_out"
        single = {name: reader.nonzero(f"{name}_multiplier", 1.0) for name in names}
        gate, down = _numbers(reader, "mlp", 2)
        return cls(**single, gate=gate, down=down, ssm=_numbers(reader, "ssm", 5))


def _numbers(reader: ConfigReader, name: str, count: int) -> tuple[float, ...]:
    key = f"{name}_multipliers"
    found = reader.read(key, list, [1.0] * count)
    is_number = [isinstance(each, int | float) and math.isfinite(each) for each in found]
    if len(found) != count or not all(is_number):
        raise UnsupportedModelError(
            f"config.json: {key} = {found}, which should be {count} numbers"
        )
    return tuple(map(float, found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(DecoderConfig):
    """Falcon-H1's config."""

    mamba: MambaSizes = NO_MAMBA
    multipliers: Multipliers = Multipliers(
        attention_in=1, attention_out=1, key=1, ssm_in=1, ssm_out=1, gate=1, down=1, ssm=(1,) * 5
    )
    logits_multiplier: float = 1.0
    is_normed: bool = False  # what leaves the states of Mamba
    gates_last: bool = True  # after that norm, not before

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.skip(*_UNREAD)
        reader.assume(mamba_d_ssm=1024)
        reader.expect("hidden_act", "silu", "swish")  # also of Mamba's convolution
        reader.expect("mamba_use_mlp", True)
        reader.expect("attn_layer_indices")
        bias = reader.read("attention_bias", bool, False)
        inner = reader.optional("mamba_d_ssm", int)
        if inner is None:
            inner = reader.positive("mamba_expand", 2) * reader.positive("hidden_size")
        elif inner < 1:
            raise UnsupportedModelError(f"config.json: mamba_d_ssm = {inner} is not positive")
        return cls.read(
            reader,
            qkv_bias=bias,
            o_proj_bias=bias,
            mlp_bias=reader.read("mlp_bias", bool, False),
            embedding_scale=reader.nonzero("embedding_multiplier", 1.0),
            is_recurrent=True,
            mamba=MambaSizes.read(reader, inner, "projectors_bias"),
            multipliers=Multipliers.read(reader),
            logits_multiplier=reader.nonzero("lm_head_multiplier", 1.0),
            is_normed=reader.read("mamba_rms_norm", bool, False),
            gates_last=reader.read("mamba_norm_before_gate", bool, True),
        )


def _scaled(op: Op, x: ir.Value, factor: float) -> ir.Value:
    return x if factor == 1 else op.Mul(x, op.constant(factor, op.dtype))


class Attention(llama.Attention):
    """Llama's attention with scaled keys."""

    def normalize(self, op: Op, q: ir.Value, k: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Q and k [1, S, heads*D]."""
        assert isinstance(self.config, Config)
        return q, _scaled(op, k, self.config.multipliers.key)


class Mamba(Mamba2):
    """Mamba 2 with scaled projections, and a norm only in some models."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(
            sizes=config.mamba,
            weights=weights,
            hidden=config.hidden_size,
            epsilon=config.rms_norm_eps,
            rows=ROWS,
        )
        self.config = config

    def project(self, op: Op, x: ir.Value) -> ir.Value:
        """Gates, what is convolved and steps, concatenated."""
        sizes, factors = self.sizes, self.config.multipliers
        y = super().project(op, _scaled(op, x, factors.ssm_in))
        if set(factors.ssm) == {1.0}:
            return y
        widths = sizes.inner, sizes.inner, sizes.shared, sizes.shared, sizes.heads
        return op.Mul(y, op.constant(np.repeat(factors.ssm, widths), op.dtype))

    def gated(self, op: Op, y: ir.Value, gate: ir.Value) -> ir.Value:
        """Gated norm before the last projection, [1, S, H * P]."""
        if not self.config.is_normed:
            return op.Mul(y, op.Swish(gate))
        if self.config.gates_last:
            return op.Mul(self.normed(op, y), op.Swish(gate))
        return super().gated(op, y, gate)


class FeedForward(GatedMLP):
    """Llama's MLP, with factors on gates and outputs."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(
            weights=weights,
            size=config.hidden_size,
            inner_size=config.intermediate_size,
            bias=config.mlp_bias,
        )
        self.multipliers = config.multipliers

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the network; x [1, S, H] -> [1, S, H]."""
        scaled = _scaled(op, self.gate_proj(op, x), self.multipliers.gate)
        gate = activate(op, scaled, self.activation)
        y = self.down_proj(op, op.Mul(gate, self.up_proj(op, x)))
        return _scaled(op, y, self.multipliers.down)


class DecoderLayer:
    """Block of attention and Mamba 2 in parallel, then an MLP."""

    def __init__(self, config: Config, weights: Weights) -> None:
        hidden, epsilon = config.hidden_size, config.rms_norm_eps
        self.multipliers = config.multipliers
        self.input_layernorm = RMSNorm(weights / "input_layernorm", hidden, epsilon)
        self.self_attn = Attention(config, weights / "self_attn")
        self.mamba = Mamba(config, weights / "mamba")
        self.pre_ff_layernorm = RMSNorm(weights / "pre_ff_layernorm", hidden, epsilon)
        self.feed_forward = FeedForward(config, weights / "feed_forward")

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        factors, rows = self.multipliers, self.input_layernorm(op, x)
        attended = self.self_attn.forward(op, _scaled(op, rows, factors.attention_in), state, layer)
        branches = (
            _scaled(op, self.mamba.forward(op, rows, state, layer), factors.ssm_out),
            _scaled(op, attended, factors.attention_out),
        )
        x = op.Add(x, op.Add(*branches))
        return op.Add(x, self.feed_forward(op, self.pre_ff_layernorm(op, x)))


class Model(llama.Model):
    """Llama's model with such blocks and scaled logits."""

    norm_name = "final_layernorm"

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.logits_multiplier = config.logits_multiplier

    def make_layer(self, config: DecoderConfig, weights: Weights, index: int) -> DecoderLayer:
        """A block; all layers are alike."""
        del index
        assert isinstance(config, Config)
        return DecoderLayer(config, weights)

    def head(self, op: Op, x: ir.Value) -> ir.Value:
        """Residual stream [1, R, H] -> logits [1, R, V]."""
        return _scaled(op, super().head(op, x), self.logits_multiplier)
