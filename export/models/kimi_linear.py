"""Kimi Linear (arXiv 2510.26692): Kimi Delta Attention, latent attention without RoPE, experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from edgellm.core.errors import UnsupportedModelError
from edgellm.core.graph_io import ROWS
from edgellm.export.checkpoints.experts.stacked import experts_of
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import (
    FULL,
    LINEAR,
    AttentionKind,
    read_layer_types,
    read_networks,
)
from edgellm.export.config.reader import REMEDY, ConfigReader
from edgellm.export.layers.attention import PassState, merge_heads, split_heads
from edgellm.export.layers.delta import DeltaRule, DeltaSizes
from edgellm.export.layers.experts import NO_ROUTING, Mixture, Routing, SigmoidRouter
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.mlp import MLP, GatedMLP
from edgellm.export.layers.norm import RMSNorm
from edgellm.export.models import llama, minicpm3
from edgellm.export.onnx.builder import Op

TINY = {
    **llama.TINY,
    "model_type": "kimi_linear",
    "num_key_value_heads": 6,
    "pad_token_id": 3,
    "tie_word_embeddings": False,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "layer_types": [LINEAR, FULL, LINEAR],
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
}
# Names in published config.json files by those in transformers' code; the former win.
_PUBLISHED = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
_DEFAULTS = {
    "num_key_value_heads": 32,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_intermediate_size": 1024,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
}
_ONLY = {
    "hidden_act": ("silu", "swish"),  # also of convolutions
    "mla_use_nope": (True,),
    "moe_layer_freq": (1,),
    "moe_router_activation_func": ("sigmoid",),
    "n_group": (1,),
    "tie_word_embeddings": (False,),  # transformers never ties them
    "topk_group": (1,),
    "topk_method": ("noaux_tc",),
}
# Of RoPE, which no layer has, of groups of experts, and of MTP layers, which transformers ignores.
_UNREAD = (
    "num_nextn_predict_layers",
    "rope_interleave",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "use_grouped_topk",
)
_NO_SIZES = DeltaSizes(key_heads=1, value_heads=1, key_dim=1, value_dim=1, window=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(minicpm3.Config):
    """Kimi Linear's config."""

    delta: DeltaSizes = _NO_SIZES
    routing: Routing = NO_ROUTING
    shared: int = 1  # shared experts, as one of their total width
    sparse_layers: tuple[bool, ...] = ()  # whether a layer has experts

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        for name, published in _PUBLISHED.items():
            if (value := reader.optional(published, object)) is not None:
                reader.replace(**{name: value})
        reader.skip(*_UNREAD)
        reader.assume(**_DEFAULTS)
        for key, allowed in _ONLY.items():
            reader.expect(key, *allowed)
        own = reader.read("linear_attn_config", dict, {})
        config = cls.latent(
            reader,
            is_recurrent=True,
            delta=_read_sizes(reader, own),
            routing=Routing.read(
                reader,
                size="moe_intermediate_size",
                normalizes=reader.read("norm_topk_prob", bool, True),
                added=1e-20,
                scale=reader.read("routed_scaling_factor", float, 2.446),
            ),
            shared=reader.positive("n_shared_experts"),
            sparse_layers=_read_sparse_layers(reader),
        )
        types = _read_types(reader, own)
        attends = AttentionKind(None)
        return config.attending(tuple(attends if kind == FULL else None for kind in types))


def _read_sizes(reader: ConfigReader, own: dict[str, Any]) -> DeltaSizes:
    """Sizes of Kimi Delta Attention; `own` are those of published config.json files."""
    keys = {"linear_head_dim": "head_dim", "linear_num_heads": "num_heads"}
    keys["linear_conv_kernel_dim"] = "short_conv_kernel_size"
    known = {*keys.values(), "full_attn_layers", "kda_layers"}
    if unknown := sorted({*map(str, own)} - known):
        raise UnsupportedModelError(
            f"config.json: linear_attn_config has {unknown[0]}, which is not supported",
            hint=f"supported: {', '.join(sorted(known))}",
        )
    reader.replace(**{key: own[theirs] for key, theirs in keys.items() if theirs in own})
    heads = reader.positive("linear_num_heads", 32)
    size = reader.positive("linear_head_dim", 128)
    return DeltaSizes(
        key_heads=heads,
        value_heads=heads,
        key_dim=size,
        value_dim=size,
        window=reader.positive("linear_conv_kernel_dim", 4),
        by_channel=True,
    ).checked()


def _read_types(reader: ConfigReader, own: dict[str, Any]) -> tuple[str, ...]:
    """Type of each layer; published config.json files list layers from 1 on."""
    layers = reader.positive("num_hidden_layers")
    usual = [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(layers)]
    listed = {"full_attn_layers", "kda_layers"} <= {*own}
    if listed and reader.optional("layer_types", list) is None:
        attending = _listed(own["full_attn_layers"])
        if sorted([*attending, *_listed(own["kda_layers"])]) != [*range(1, layers + 1)]:
            raise UnsupportedModelError(
                "config.json: linear_attn_config does not list each layer once", hint=REMEDY
            )
        usual = [FULL if layer in attending else LINEAR for layer in range(1, layers + 1)]
    return read_layer_types(reader, usual, (FULL, LINEAR))


def _listed(found: object) -> Sequence[int]:
    """Integers of a list of layers."""
    return [each for each in found if type(each) is int] if isinstance(found, list) else []


def _read_sparse_layers(reader: ConfigReader) -> tuple[bool, ...]:
    """Whether each layer has experts."""
    dense = reader.read("first_k_dense_replace", int, 1)
    layers = range(reader.positive("num_hidden_layers"))
    return read_networks(reader, [layer >= dense for layer in layers])


class KimiDeltaRule(DeltaRule):
    """The delta rule with a decay of each channel."""

    def rates(self, op: Op) -> ir.Value:
        """Logarithms of the heads' rates of decay [H]."""
        heads, info = self.sizes.value_heads, self.weights.info("A_log")
        is_vector = info is not None and len(info.shape) == 1  # in GGUF files
        stored = self.parameter(op, "A_log", (heads,) if is_vector else (1, 1, heads, 1))
        return stored if is_vector else op.Reshape(stored, op.constant([-1]))


class DeltaAttention:
    """Kimi Delta Attention with projections, norm and output gate."""

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        assert isinstance(config, Config)
        self.sizes = sizes = config.delta
        hidden = config.hidden_size
        self.rule = KimiDeltaRule(sizes, weights, ROWS)
        widths = {"q": sizes.keys, "k": sizes.keys, "v": sizes.values, "b": sizes.value_heads}
        self.parts = [
            Linear(weights / f"{name}_proj", hidden, width, bias=False)
            for name, width in widths.items()
        ]
        low_rank = {"f": (sizes.key_dim, sizes.keys), "g": (sizes.value_dim, sizes.values)}
        self.decay, self.gate = (
            (
                Linear(weights / f"{name}_a_proj", hidden, rank, bias=False),
                Linear(weights / f"{name}_b_proj", rank, width, bias=False),
            )
            for name, (rank, width) in low_rank.items()
        )
        self.norm = RMSNorm(weights / "o_norm", sizes.value_dim, config.rms_norm_eps)
        self.o_proj = Linear(weights / "o_proj", sizes.values, hidden, bias=False)

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        *qkv, b = (part(op, x) for part in self.parts)
        decay, gate = (up(op, down(op, x)) for down, up in (self.decay, self.gate))
        y = self.rule(op, op.Concat(*qkv, axis=-1), decay, b, state, layer)
        normed = merge_heads(op, self.norm(op, split_heads(op, y, self.sizes.value_dim)))
        return self.o_proj(op, op.Mul(normed, op.Sigmoid(gate)))


class DecoderLayer(llama.DecoderLayer):
    """Pre-norm block of latent attention."""

    attention = minicpm3.Attention

    def __init__(self, config: DecoderConfig, weights: Weights, *, is_sparse: bool) -> None:
        self.is_sparse = is_sparse
        # Published for experts; transformers also saves other networks so.
        published = "block_sparse_moe"
        self.mlp_name = published if (weights / published).has_any() else "mlp"
        super().__init__(config, weights)

    def feed_forward(self, config: DecoderConfig, weights: Weights) -> MLP:
        """A dense network, or routed experts and shared ones."""
        if not self.is_sparse:
            return super().feed_forward(config, weights)
        assert isinstance(config, Config)
        hidden, routing = config.hidden_size, config.routing
        router = SigmoidRouter(
            weights=weights / "gate",
            hidden=hidden,
            routing=routing,
            bias=(weights / "gate", "e_score_correction_bias"),
        )
        shared = GatedMLP(
            weights=weights / "shared_experts",
            size=hidden,
            inner_size=config.shared * routing.size,
            bias=False,
        )
        sizes, names = (hidden, routing.size), ("w1", "w3", "w2")
        stack = experts_of(weights / "experts", routing.experts, sizes, names)
        return Mixture(route=router, stack=stack, routing=routing, shared=shared)


class DeltaLayer(DecoderLayer):
    """Pre-norm block of Kimi Delta Attention."""

    attention = DeltaAttention  # type: ignore[assignment]


class Model(llama.Model):
    """Llama's model with such blocks."""

    def make_layer(self, config: DecoderConfig, weights: Weights, index: int) -> llama.Layer:
        """A block of the layer's type."""
        assert isinstance(config, Config)
        kind = DeltaLayer if config.kinds[index] is None else DecoderLayer
        return kind(config, weights, is_sparse=config.sparse_layers[index])
