"""Gemma 3n, the language model: alternating updates (AltUp), LAuReL, sparse activations.

A token has A hidden states (arXiv 2301.13310). Each layer predicts all of them from all, computes
the active one, and corrects all by its result. Per-layer embeddings and shared keys and values are
those of Gemma 4. L is the number of layers, P the size of a per-layer embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import onnx_ir as ir

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import (
    FULL,
    SLIDING,
    AttentionKind,
    LayerKV,
    check_length,
    every,
    read_layer_types,
    read_window,
    window_of,
)
from edgellm.export.config.reader import REMEDY, ConfigReader
from edgellm.export.config.rope import read_ropes
from edgellm.export.layers.activations import activate
from edgellm.export.layers.attention import PassState
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.norm import RMSNorm
from edgellm.export.layers.recurrent import floats
from edgellm.export.models import gemma2, gemma4_text, llama
from edgellm.export.onnx.builder import Op
from edgellm.export.onnx.functions.attention import call
from edgellm.export.onnx.functions.experts import router

TINY = {
    **llama.TINY,
    "model_type": "gemma3n_text",
    "num_hidden_layers": 6,
    "head_dim": 32,
    "intermediate_size": [80, 80, 112, 112, 80, 80],
    "hidden_activation": gemma2.ACTIVATION,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
    "sliding_window": 12,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 80,
    "hidden_size_per_layer_input": 32,
    "final_logit_softcapping": 5.0,
    "altup_num_inputs": 3,
    "altup_active_idx": 1,
    "laurel_rank": 16,
    "activation_sparsity_pattern": [0.8, 0.0, 0.5, 0.0, 0.0, 0.0],
}
_DEFAULTS = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "hidden_activation": gemma2.ACTIVATION,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "num_kv_shared_layers": 15,
    "altup_num_inputs": 4,
    "altup_active_idx": 0,
    "laurel_rank": 64,
}
_SPARSITY, _SPARSE_LAYERS = 0.95, 10  # of the published models, in their first layers
SMALLEST_SQUARE = 1e-5  # mean square of a hidden state that is scaled to another's magnitude


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(gemma4_text.SharedKVConfig):
    """Gemma 3n's config."""

    inner_sizes: tuple[int, ...] = ()  # of the MLP, by layer
    sparsities: tuple[float, ...] = ()  # share of gates that are zeroed, by layer
    num_states: int = 1  # A
    active: int = 0  # index of the hidden state that layers compute
    has_scaled_output: bool = True  # of the active state, before the per-layer embedding
    laurel_rank: int = 1

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json; those of vision-language models have few keys."""
        reader.assume(**_DEFAULTS)
        reader.skip("altup_coef_clip")  # for training
        sizes = _read_sizes(reader)
        bias = reader.read("attention_bias", bool, False)
        config = cls.read(
            reader,
            rope=None,
            activation_key="hidden_activation",
            qkv_bias=bias,
            o_proj_bias=bias,
            embedding_scale=reader.positive("hidden_size") ** 0.5,
            attention_scale=1.0,
            logits_softcap=gemma2.read_cap(reader, "final_logit_softcapping"),
            per_layer_size=reader.positive("hidden_size_per_layer_input"),
            per_layer_vocab_size=reader.positive("vocab_size_per_layer_input"),
            inner_sizes=sizes,
            sparsities=_read_sparsities(reader),
            num_states=reader.positive("altup_num_inputs"),
            active=reader.read("altup_active_idx", int),
            has_scaled_output=reader.read("altup_correct_scale", bool, True),
            laurel_rank=reader.positive("laurel_rank"),
        )
        assert isinstance(config, cls)
        if not 0 <= config.active < config.num_states:
            raise UnsupportedModelError(
                f"config.json: altup_active_idx = {config.active} is none of the "
                f"{config.num_states} hidden states (altup_num_inputs)",
                hint=REMEDY,
            )
        return config.attending(config._read_kinds(reader))

    def _read_kinds(self, reader: ConfigReader) -> tuple[AttentionKind, ...]:
        """Attention of each layer, with the sources of shared keys and values."""
        types = read_layer_types(reader, every(5, self.num_hidden_layers))
        window = read_window(reader, types)
        thetas = {FULL: 1e6, SLIDING: reader.read("rope_local_base_freq", float, 1e4)}
        ropes = read_ropes(reader, thetas, self.head_dim, self.max_position_embeddings)
        sources = gemma4_text.read_sources(reader, types)
        heads = self.num_key_value_heads, self.head_dim
        return tuple(
            AttentionKind(ropes[kind], window_of(kind, window), LayerKV(*heads, source))
            for kind, source in zip(types, sources, strict=True)
        )


def _read_sizes(reader: ConfigReader) -> tuple[int, ...]:
    """Intermediate size of each layer; the config has one for all, or a list."""
    layers = reader.positive("num_hidden_layers")
    if not isinstance(given := reader.read("intermediate_size", object), list):
        return (reader.positive("intermediate_size"),) * layers
    check_length(reader, "intermediate_size", given)
    for size in given:
        reader.replace(intermediate_size=size)
        reader.positive("intermediate_size")
    return tuple(given)


def _read_sparsities(reader: ConfigReader) -> tuple[float, ...]:
    layers = reader.positive("num_hidden_layers")
    first = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
    default = [_SPARSITY] * first + [0.0] * (layers - first)
    found = reader.read("activation_sparsity_pattern", list, default)
    check_length(reader, "activation_sparsity_pattern", found)
    if any(not isinstance(each, (int, float)) or not each < 1 for each in found):
        raise UnsupportedModelError(
            f"config.json: activation_sparsity_pattern = {found} should have numbers below 1",
            hint=REMEDY,
        )
    return tuple(float(each) for each in found)


def _root_mean_square(op: Op, x: ir.Value, smallest: float = 0.0) -> ir.Value:
    """X float32 [..., H] -> [..., 1]; `smallest` is a lower bound of the mean square."""
    square = _mean(op, op.Mul(x, x))
    return op.Sqrt(op.Max(square, op.constant(np.float32(smallest))) if smallest else square)


def _mean(op: Op, x: ir.Value) -> ir.Value:
    """X [..., H] -> [..., 1]."""
    return op.ReduceMean(x, op.constant([-1]), keepdims=1)


def _typed(op: Op, x: ir.Value) -> ir.Value:
    """Float32 x in the graph's type."""
    return x if op.dtype == ir.DataType.FLOAT else op.Cast(x, to=int(op.dtype))


class SparseGatedMLP:
    """A gated MLP whose gates below a quantile of a normal distribution become zero.

    The distribution has the mean and deviation of the token's gates.
    """

    def __init__(self, config: Config, weights: Weights, layer: int) -> None:
        hidden, inner = config.hidden_size, config.inner_sizes[layer]
        self.gate_proj = Linear(weights / "gate_proj", hidden, inner, bias=False)
        self.up_proj = Linear(weights / "up_proj", hidden, inner, bias=False)
        self.down_proj = Linear(weights / "down_proj", inner, hidden, bias=False)
        self.activation, self.sparsity = config.activation, config.sparsities[layer]

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        gate = self.gate_proj(op, x)
        if self.sparsity > 0:
            gate = self._sparse(op, gate)
        gate = activate(op, gate, self.activation)
        return self.down_proj(op, op.Mul(gate, self.up_proj(op, x)))

    def _sparse(self, op: Op, gate: ir.Value) -> ir.Value:
        centered = floats(op, gate)
        centered = op.Sub(centered, _mean(op, centered))
        deviations = op.constant(np.float32(NormalDist().inv_cdf(self.sparsity)))
        cutoff = op.Mul(_root_mean_square(op, centered), deviations)
        above = op.Max(op.Sub(centered, cutoff), op.constant(np.float32(0)))
        return _typed(op, above)


class AltUp:
    """Prediction and correction of a token's hidden states [1, S, A, H]."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.weights, self.hidden, self.count = weights, config.hidden_size, config.num_states
        self.active = config.active
        self.router_norm = RMSNorm(weights / "router_norm", self.hidden, config.rms_norm_eps)

    def predict(self, op: Op, x: ir.Value) -> ir.Value:
        """States [1, S, A, H] of a layer's input -> their predictions."""
        mixed = self._coefficients(op, active_state(op, x, self.active), "prediction_coefs")
        by_state = op.Reshape(mixed, op.constant([1, -1, self.count, self.count]))
        return op.Add(op.MatMul(by_state, x), x)

    def correct(self, op: Op, predictions: ir.Value, activated: ir.Value) -> ir.Value:
        """Predictions [1, S, A, H] and the layer's output [1, S, H] -> states [1, S, A, H]."""
        gains = self._coefficients(op, activated, "correction_coefs")
        gains = op.Add(gains, op.constant(1, op.dtype))
        innovation = op.Sub(activated, active_state(op, predictions, self.active))
        last, state = op.constant([3]), op.constant([2])
        return op.Add(
            predictions, op.Mul(op.Unsqueeze(gains, last), op.Unsqueeze(innovation, state))
        )

    def _coefficients(self, op: Op, x: ir.Value, name: str) -> ir.Value:
        """X [1, S, H] -> [1, S, A] or, of predictions, [1, S, A * A]."""
        with op.scope(self.weights.prefix.rstrip(".")):
            rows = op.Mul(self.router_norm(op, x), op.constant(1 / self.hidden, op.dtype))
            routed = op.Tanh(self._product(op, rows, "modality_router", (self.count, self.hidden)))
            width = self.count ** (2 if name == "prediction_coefs" else 1)
            return _typed(op, self._product(op, routed, name, (width, self.count)))

    def _product(self, op: Op, x: ir.Value, name: str, shape: tuple[int, int]) -> ir.Value:
        """X [1, S, in] -> float32 [1, S, out]; such small matrices are never rounded."""
        return call(
            op, router(), x, op.parameter((self.weights / name).take("weight", shape, op.dtype))
        )


def active_state(op: Op, x: ir.Value, index: int) -> ir.Value:
    """States [1, S, A, H] -> one of them [1, S, H]."""
    return op.Gather(x, op.constant(np.int64(index)), axis=2)


class DecoderLayer:
    """Gemma 2's block of the active state, next to a residual of low rank (LAuReL)."""

    def __init__(self, config: Config, weights: Weights, layer: int) -> None:
        hidden, epsilon, size = config.hidden_size, config.rms_norm_eps, config.per_layer_size
        self.weights, self.config = weights, config
        self.self_attn = gemma4_text.Attention(config, weights / "self_attn", layer)
        self.mlp = SparseGatedMLP(config, weights / "mlp", layer)
        self.altup = AltUp(config, weights / "altup")

        def norm(name: str) -> RMSNorm:
            return RMSNorm(weights / name, hidden, epsilon)

        self.input_layernorm = norm("input_layernorm")
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")
        self.post_laurel_norm = norm("laurel.post_laurel_norm")
        self.post_per_layer_input_norm = norm("post_per_layer_input_norm")

        def linear(name: str, inputs: int, outputs: int) -> Linear:
            return Linear(weights / name, inputs, outputs, bias=False)

        self.linear_left = linear("laurel.linear_left", hidden, config.laurel_rank)
        self.linear_right = linear("laurel.linear_right", config.laurel_rank, hidden)
        self.per_layer_input_gate = linear("per_layer_input_gate", hidden, size)
        self.per_layer_projection = linear("per_layer_projection", size, hidden)

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """States [1, S, A, H] -> [1, S, A, H]."""
        predictions = self.altup.predict(op, x)
        activated = self._activated(
            op, active_state(op, predictions, self.config.active), state, layer
        )
        corrected = self.altup.correct(op, predictions, activated)
        given = state.shared[gemma4_text.input_name(layer)]
        return op.Add(corrected, self._per_layer(op, corrected, given))

    def _activated(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        normed = self.input_layernorm(op, x)
        low_rank = self.post_laurel_norm(op, self.linear_right(op, self.linear_left(op, normed)))
        attended = self.self_attn.forward(op, normed, state, layer)
        gated = op.Add(x, self.post_attention_layernorm(op, attended))
        both = op.Add(gated, op.Add(normed, low_rank))
        x = op.Mul(both, op.constant(2**-0.5, op.dtype))
        y = self.mlp(op, self.pre_feedforward_layernorm(op, x))
        return op.Add(x, self.post_feedforward_layernorm(op, y))

    def _per_layer(self, op: Op, x: ir.Value, given: ir.Value) -> ir.Value:
        """States [1, S, A, H] and embeddings [1, S, P] -> what is added [1, S, A, H].

        The first state gets nothing.
        """
        active = active_state(op, x, self.config.active)
        scale = (self.weights / "altup").take(
            "correct_output_scale", (self.config.hidden_size,), op.dtype
        )
        if self.config.has_scaled_output:
            active = op.Mul(active, op.cast(op.parameter(scale), op.dtype))
        gate = activate(op, self.per_layer_input_gate(op, active), self.config.activation)
        added = self.per_layer_projection(op, op.Mul(gate, given))
        added = op.Unsqueeze(self.post_per_layer_input_norm(op, added), op.constant([2]))
        shares = np.arange(self.config.num_states).clip(max=1)[:, None]
        return op.Mul(added, op.constant(shares, op.dtype))


class Model(gemma2.Model):
    """Gemma 2's model with A hidden states of a token between its ends."""

    final_norm = RMSNorm

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        model = weights / "model"
        self.active, self.vocab_size = config.active, config.per_layer_vocab_size
        self.per_layer_inputs = gemma4_text.PerLayerInputs(config, model)
        self.altup_projections, self.altup_unembed_projections = (
            [
                Linear(
                    model / f"{name}.{index}", config.hidden_size, config.hidden_size, bias=False
                )
                for index in range(config.num_states - 1)
            ]
            for name in ("altup_projections", "altup_unembed_projections")
        )

    def make_layer(self, config: DecoderConfig, weights: Weights, index: int) -> llama.Layer:
        """See `llama.Model`."""
        assert isinstance(config, Config)
        return DecoderLayer(config, weights, index)

    def forward(self, op: Op, input_ids: ir.Value, state: PassState) -> ir.Value:
        """input_ids int64 [1, S] -> the mean [1, S, H] of the last layer's states.

        The residual streams are the active states.
        """
        x = self._joined(op, self._states(op, self.embed(op, input_ids, state)))
        for index, layer in enumerate(self.layers):
            state.residuals.append(active_state(op, x, self.active))
            with op.scope(f"layers.{index}"):
                x = layer.forward(op, x, state, index)
        return self._merged(op, x)

    def embed(self, op: Op, input_ids: ir.Value, state: PassState) -> ir.Value:
        """See `llama.Model`; tokens beyond the per-layer table have the embeddings of token 0."""
        x = super().embed(op, input_ids, state)
        in_table = op.GreaterOrEqual(op.constant(np.int64(self.vocab_size - 1)), input_ids)
        ids = op.Where(in_table, input_ids, op.constant(np.int64(0)))
        for layer, value in enumerate(self.per_layer_inputs(op, ids, x)):
            state.shared[gemma4_text.input_name(layer)] = value
        return x

    def _states(self, op: Op, x: ir.Value) -> list[ir.Value]:
        """X [1, S, H] -> A times [1, S, H], of equal magnitude."""
        magnitude = _root_mean_square(op, floats(op, x))
        return [
            x,
            *(self._scaled(op, linear(op, x), magnitude) for linear in self.altup_projections),
        ]

    def _joined(self, op: Op, states: Sequence[ir.Value]) -> ir.Value:
        """A times [1, S, H] -> [1, S, A, H]."""
        axis = op.constant([2])
        return op.Concat(*(op.Unsqueeze(each, axis) for each in states), axis=2)

    def _merged(self, op: Op, x: ir.Value) -> ir.Value:
        """States [1, S, A, H] -> [1, S, H]."""
        first = active_state(op, x, 0)
        magnitude, total = _root_mean_square(op, floats(op, first)), first
        for index, linear in enumerate(self.altup_unembed_projections, start=1):
            total = op.Add(
                total, self._scaled(op, linear(op, active_state(op, x, index)), magnitude)
            )
        return op.Mul(total, op.constant(1 / (1 + len(self.altup_unembed_projections)), op.dtype))

    def _scaled(self, op: Op, x: ir.Value, magnitude: ir.Value) -> ir.Value:
        """X [1, S, H] with a magnitude float32 [1, S, 1]."""
        wide = floats(op, x)
        own = _root_mean_square(op, wide, SMALLEST_SQUARE)
        return _typed(op, op.Mul(wide, op.Div(magnitude, own)))
