"""Laguna: query heads and windows by layer, gates by softplus, experts after the first layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.experts.stacked import experts_of
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import (
    FULL,
    SLIDING,
    AttentionKind,
    check_length,
    read_layer_types,
    read_networks,
    read_window,
    window_of,
)
from edgellm.export.config.reader import REMEDY, ConfigReader
from edgellm.export.config.rope import RopeTraits, read_ropes
from edgellm.export.layers.activations import softplus
from edgellm.export.layers.attention import scale_heads
from edgellm.export.layers.experts import NO_ROUTING, Mixture, Routing, SigmoidRouter
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.mlp import MLP, GatedMLP
from edgellm.export.layers.recurrent import floats
from edgellm.export.models import llama, qwen3
from edgellm.export.onnx.builder import Op

TINY = {
    **llama.TINY,
    "model_type": "laguna",
    "tie_word_embeddings": False,
    "head_dim": 32,
    "num_attention_heads_per_layer": [4, 6, 2],
    "layer_types": [FULL, SLIDING, SLIDING],
    "sliding_window": 12,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 64,
    "moe_routed_scaling_factor": 1.5,
    "moe_router_logit_softcapping": 2.0,
}
_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
_PER_HEAD, _PER_ELEMENT = "per-head", "per-element"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(DecoderConfig):
    """Laguna's config; `num_attention_heads` may differ in each layer."""

    heads: tuple[int, ...] = ()  # of queries, by layer
    sparse_layers: tuple[bool, ...] = ()  # whether a layer has experts
    routing: Routing = NO_ROUTING
    shared_size: int = 0  # intermediate size of the shared expert
    router_cap: float = 0.0  # soft cap of the router's logits; 0: none
    gates_elements: bool = False  # a gate for each output of a head, not one for all

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.assume(
            num_key_value_heads=8,
            head_dim=128,
            rms_norm_eps=1e-6,
            sliding_window=512,
            shared_expert_intermediate_size=512,
        )
        for key, allowed in _ONLY.items():
            reader.expect(key, *allowed)
        bias = reader.read("attention_bias", bool, False)
        scale = reader.read("moe_routed_scaling_factor", float, 1.0)
        routing = Routing.read(
            reader, experts="num_experts", size="moe_intermediate_size", scale=scale
        )
        config = cls.read(
            reader,
            rope=None,
            qkv_bias=bias,
            o_proj_bias=bias,
            routing=routing,
            heads=tuple(_read_heads(reader)),
            sparse_layers=_read_networks(reader),
            shared_size=reader.positive("shared_expert_intermediate_size"),
            router_cap=max(reader.read("moe_router_logit_softcapping", float, 0.0), 0.0),
            gates_elements=_reads_gates_of_elements(reader),
        )
        return config.attending(_read_kinds(reader, config))


_ONLY = {
    "decoder_sparse_step": (1,),
    "moe_apply_router_weight_on_input": (False,),
    "norm_topk_prob": (True,),
    "partial_rotary_factor": (),  # it is in rope_parameters
}


def _read_heads(reader: ConfigReader) -> Sequence[int]:
    """Query heads of each layer."""
    heads, layers = reader.positive("num_attention_heads"), reader.positive("num_hidden_layers")
    found = reader.read("num_attention_heads_per_layer", list, [heads] * layers)
    check_length(reader, "num_attention_heads_per_layer", found)
    shared = reader.positive("num_key_value_heads")
    if wrong := [each for each in found if type(each) is not int or each < 1 or each % shared]:
        raise UnsupportedModelError(
            f"config.json: {wrong[0]!r} attention heads of a layer cannot share {shared} "
            "key/value heads",
            hint=REMEDY,
        )
    return found


def _read_networks(reader: ConfigReader) -> tuple[bool, ...]:
    """Whether each layer has experts."""
    layers = reader.positive("num_hidden_layers")
    found = read_networks(reader, [layer > 0 for layer in range(layers)])
    dense = [layer for layer, is_sparse in enumerate(found) if not is_sparse]
    reader.expect("mlp_only_layers", dense)  # an older key
    return found


def _reads_gates_of_elements(reader: ConfigReader) -> bool:
    """Whether each output of a head has its own gate."""
    reader.expect("gating", True, _PER_HEAD, _PER_ELEMENT)
    is_fine = reader.optional("gating", object) == _PER_ELEMENT
    kind, layers = "per_element" if is_fine else "per_head", reader.positive("num_hidden_layers")
    reader.expect("gating_types", [kind] * layers)
    return is_fine


def _read_kinds(reader: ConfigReader, config: DecoderConfig) -> tuple[AttentionKind, ...]:
    """Attention of each layer."""
    types = read_layer_types(reader, [FULL] * config.num_hidden_layers)
    window = read_window(reader, types)
    if reader.optional("rope_parameters", dict) is None:
        reader.replace(rope_parameters=_ROPES)
    thetas = {kind: _ROPES[kind]["rope_theta"] for kind in _ROPES}
    size, longest = config.head_dim, config.max_position_embeddings
    ropes = read_ropes(reader, thetas, size, longest, RopeTraits(partial=1.0))
    return tuple(AttentionKind(ropes[kind], window_of(kind, window)) for kind in types)


class Attention(qwen3.Attention):
    """Qwen3's attention, each head or output times the softplus of a gate."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, input_size: int | None = None
    ) -> None:
        super().__init__(config, weights, input_size)
        assert isinstance(config, Config)
        heads, self.gates_elements = config.num_attention_heads, config.gates_elements
        gates = heads * config.head_dim if config.gates_elements else heads
        self.g_proj = Linear(weights / "g_proj", config.hidden_size, gates, bias=False)

    def gate(self, op: Op, x: ir.Value, y: ir.Value) -> ir.Value:
        """X [1, S, H], y [1, S, heads*D] -> [1, S, heads*D]."""
        factors = softplus(op, floats(op, self.g_proj(op, x)))
        if op.dtype != ir.DataType.FLOAT:
            factors = op.Cast(factors, to=int(op.dtype))
        if self.gates_elements:
            return op.Mul(y, factors)
        return scale_heads(op, y, factors, self.config.head_dim)


class CappedRouter(SigmoidRouter):
    """Router with a soft cap on its logits."""

    def __init__(self, config: Config, mlp: Weights) -> None:
        hidden, bias = config.hidden_size, (mlp / "experts", "e_score_correction_bias")
        super().__init__(weights=mlp / "gate", hidden=hidden, routing=config.routing, bias=bias)
        self.cap = config.router_cap


class DecoderLayer(llama.DecoderLayer):
    """Llama's block with gated attention."""

    attention = Attention


class SparseLayer(DecoderLayer):
    """The block with experts."""

    def feed_forward(self, config: DecoderConfig, weights: Weights) -> MLP:
        """Routed experts, and a shared one."""
        assert isinstance(config, Config)
        hidden, routing = config.hidden_size, config.routing
        shared = GatedMLP(
            weights=weights / "shared_expert",
            size=hidden,
            inner_size=config.shared_size,
            bias=False,
        )
        stack = experts_of(weights / "experts", routing.experts, (hidden, routing.size))
        router = CappedRouter(config, weights)
        return Mixture(route=router, stack=stack, routing=routing, shared=shared)


class Model(llama.Model):
    """Llama's model with such blocks."""

    def make_layer(self, config: DecoderConfig, weights: Weights, index: int) -> llama.Layer:
        """A block with the layer's heads."""
        assert isinstance(config, Config)
        kind = SparseLayer if config.sparse_layers[index] else DecoderLayer
        return kind(replace(config, num_attention_heads=config.heads[index]), weights)
