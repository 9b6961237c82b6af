"""Gemma 4, the language model: per-layer embeddings, KV shared by the last layers, experts.

E2B and E4B: each layer adds an embedding of the token for that layer (PLE). The last layers have
no keys and values of their own. Heads of global layers have another size than those in windows.
26B-A4B: experts next to each MLP, whose router reads the hidden states before their norms.
L is the number of layers, P the size of a per-layer embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import onnx_ir as ir

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.experts.stacked import experts_of
from edgellm.export.checkpoints.experts.weights import JoinedExperts, Stack
from edgellm.export.checkpoints.weights import StoredTensor, Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import (
    FULL,
    SLIDING,
    AttentionKind,
    CausalKind,
    LayerKV,
    every,
    read_layer_types,
    read_window,
    window_of,
)
from edgellm.export.config.reader import REMEDY, ConfigReader
from edgellm.export.config.rope import PROPORTIONAL_ROPE, read_ropes
from edgellm.export.layers.activations import activate
from edgellm.export.layers.attention import PassState, Scores, merge_heads, split_heads
from edgellm.export.layers.embedding import Embedding
from edgellm.export.layers.experts import Mixture, Router, Routing
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.mlp import GatedMLP
from edgellm.export.layers.norm import RMSNorm, UnweightedRMSNorm
from edgellm.export.models import gemma2, llama
from edgellm.export.onnx.builder import Op

TINY = {
    **llama.TINY,
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 32,
    "global_head_dim": 48,
    "hidden_activation": gemma2.ACTIVATION,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
    "sliding_window": 12,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 32,
    "final_logit_softcapping": 5.0,
}
_ROPES = {
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
OF_KV = ("k_proj", "v_proj", "k_norm", "v_norm")  # tensors that layers with shared KV ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKVConfig(gemma2.Config):
    """Config of decoders with per-layer embeddings and layers that share keys and values."""

    per_layer_size: int = 0  # P; 0: no per-layer embeddings
    per_layer_vocab_size: int = 0
    has_equal_kv: bool = False  # values are keys before their norm and RoPE, in global layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(SharedKVConfig):
    """Gemma 4's config; `head_dim` is that of layers with windows."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "hidden_activation": gemma2.ACTIVATION,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    }
    has_double_wide_mlp: bool = False  # in layers with shared KV
    routing: Routing | None = None  # None: no experts
    # In sliding layers the tokens of an image attend to each other; global layers are causal.
    has_bidirectional_images: bool = False
    pad_token_id: int = 0  # whose embedding for each layer images have

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json; those of vision-language models have few keys."""
        reader.assume(**cls.DEFAULTS)
        reader.expect("use_bidirectional_attention", "vision")
        attention = reader.optional("use_bidirectional_attention", str)
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
            per_layer_size=reader.read("hidden_size_per_layer_input", int, 0),
            per_layer_vocab_size=reader.positive("vocab_size_per_layer_input"),
            has_double_wide_mlp=reader.read("use_double_wide_mlp", bool, False),
            has_equal_kv=reader.read("attention_k_eq_v", bool, False),
            routing=_read_routing(reader),
            has_bidirectional_images=attention is not None,
            pad_token_id=reader.read("pad_token_id", int, 0),
        )
        assert isinstance(config, cls)
        config._check()
        return config.attending(config._read_kinds(reader))

    def _check(self) -> None:
        if self.per_layer_size < 0:
            raise UnsupportedModelError(
                f"config.json: hidden_size_per_layer_input = {self.per_layer_size} is negative",
                hint=REMEDY,
            )
        if self.per_layer_size and self.per_layer_vocab_size < self.vocab_size:
            raise UnsupportedModelError(
                f"config.json: vocab_size_per_layer_input = {self.per_layer_vocab_size} is below "
                f"vocab_size = {self.vocab_size}",
                hint=REMEDY,
            )

    def _read_kinds(self, reader: ConfigReader) -> tuple[AttentionKind, ...]:
        """Attention of each layer, with the sources of shared keys and values."""
        layers = self.num_hidden_layers
        types = [*read_layer_types(reader, every(6, layers))]
        types[-1] = FULL  # as in transformers, whatever the config states
        window, heads = read_window(reader, types), _read_heads(reader, self, types)
        sizes = {kind: heads.get(kind, (0, self.head_dim))[1] for kind in (FULL, SLIDING)}
        if reader.optional("rope_parameters", dict) is None:
            reader.replace(rope_parameters=_ROPES)
        thetas = {kind: _ROPES[kind]["rope_theta"] for kind in _ROPES}
        ropes = read_ropes(reader, thetas, sizes, self.max_position_embeddings, PROPORTIONAL_ROPE)
        sources = read_sources(reader, types)
        of_type: dict[str, type[AttentionKind]] = dict.fromkeys(types, AttentionKind)
        if self.has_bidirectional_images:
            of_type[FULL] = CausalKind
        return tuple(
            of_type[kind](ropes[kind], window_of(kind, window), LayerKV(*heads[kind], source))
            for kind, source in zip(types, sources, strict=True)
        )


def _read_routing(reader: ConfigReader) -> Routing | None:
    if not reader.read("enable_moe_block", bool, False):
        reader.skip("num_experts", "top_k_experts", "moe_intermediate_size")
        return None
    return Routing.read(
        reader,
        experts="num_experts",
        top_k="top_k_experts",
        size="moe_intermediate_size",
        activation="hidden_activation",
    )


def _read_heads(
    reader: ConfigReader, config: Config, types: Sequence[str]
) -> dict[str, tuple[int, int]]:
    """KV heads and their size of each type of layer in use.

    Transformers 5 saves `per_layer_config`, sizes by layer; the hub's configs have two keys for
    global layers.
    """
    by_layer = reader.optional("per_layer_config", dict)
    size = reader.positive("global_head_dim")
    num_kv_heads = reader.optional("num_global_key_value_heads", int)
    if by_layer is None:
        own: dict[str, Any] = {"head_dim": size}
        if config.has_equal_kv and num_kv_heads is not None:
            own["num_key_value_heads"] = num_kv_heads
        by_layer = {str(layer): own for layer, kind in enumerate(types) if kind == FULL}
    found: dict[str, tuple[int, int]] = {}
    given = {str(layer): own for layer, own in by_layer.items()}
    for layer, kind in enumerate(types):
        heads = _heads_of(given.pop(str(layer), None) or {}, config)
        if found.setdefault(kind, heads) != heads:
            raise UnsupportedModelError(
                f"config.json: per_layer_config has several sizes of heads in {kind} layers",
                hint=REMEDY,
            )
    if given:
        raise UnsupportedModelError(
            f"config.json: per_layer_config has {', '.join(map(repr, sorted(given)))}, "
            "which is no layer",
            hint=REMEDY,
        )
    return found


def _heads_of(own: Mapping[str, Any], config: Config) -> tuple[int, int]:
    """KV heads of a layer and their size, by its entry in `per_layer_config`."""
    reader = ConfigReader(own)
    found = (
        reader.positive("num_key_value_heads", config.num_key_value_heads),
        reader.positive("head_dim", config.head_dim),
    )
    reader.finish()
    if config.num_attention_heads % found[0]:
        raise UnsupportedModelError(
            f"config.json: {config.num_attention_heads} attention heads cannot share {found[0]} "
            "key/value heads",
            hint=REMEDY,
        )
    return found


def read_sources(reader: ConfigReader, types: Sequence[str]) -> list[int | None]:
    """The layer whose keys and values a layer reads, None: its own.

    The last `num_kv_shared_layers` read those of the last earlier layer of their type.
    """
    num_shared = reader.read("num_kv_shared_layers", int, 0)
    first = len(types) - num_shared
    if not 0 <= num_shared <= len(types) or {*types[:first]} != {*types}:
        raise UnsupportedModelError(
            f"config.json: num_kv_shared_layers = {num_shared}, so some layers have no earlier one "
            "of their type to share keys and values with",
            hint=REMEDY,
        )
    last = {kind: index for index, kind in enumerate(types[:first])}
    return [None if index < first else last[kind] for index, kind in enumerate(types)]


class Attention:
    """Self-attention with norms of queries, keys and values; some layers compute queries alone."""

    def __init__(self, config: SharedKVConfig, weights: Weights, layer: int) -> None:
        self.num_heads, self.config = config.num_attention_heads, config
        hidden, bias, epsilon = config.hidden_size, config.qkv_bias, config.rms_norm_eps
        kind = config.kinds[layer]
        assert kind is not None
        num_kv_heads, self.head_dim = config.heads_of(layer)
        self.is_shared = kind.source is not None
        width, kv_width = self.num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.q_proj = Linear(weights / "q_proj", hidden, width, bias=bias)
        self.q_norm = RMSNorm(weights / "q_norm", self.head_dim, epsilon)
        self.o_proj = Linear(weights / "o_proj", width, hidden, bias=config.o_proj_bias)
        if self.is_shared:
            weights.drop(*(f"{name}.{part}" for name in OF_KV for part in ("weight", "bias")))
            return
        self.k_proj = Linear(weights / "k_proj", hidden, kv_width, bias=bias)
        has_values = not config.has_equal_kv or kind.window is not None
        self.v_proj = (
            Linear(weights / "v_proj", hidden, kv_width, bias=bias) if has_values else None
        )
        self.k_norm = RMSNorm(weights / "k_norm", self.head_dim, epsilon)
        self.v_norm = UnweightedRMSNorm(self.head_dim, epsilon)

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        scores = Scores(scale=self.config.attention_scale)
        q = self.queries(op, x)
        if self.is_shared:
            return self.o_proj(op, state.attend_shared(layer, q, self.num_heads, scores=scores))
        k, v = self.keys_and_values(op, x)
        return self.o_proj(op, state.attend(layer, q, k, v, self.num_heads, scores=scores))

    def queries(self, op: Op, x: ir.Value) -> ir.Value:
        """X [1, S, H] -> [1, S, heads*D], without RoPE."""
        return self._by_head(op, self.q_norm, self.q_proj(op, x))

    def keys_and_values(self, op: Op, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """X [1, S, H] -> both [1, S, kv_heads*D], without RoPE."""
        k = self.k_proj(op, x)
        v = k if self.v_proj is None else self.v_proj(op, x)
        return self._by_head(op, self.k_norm, k), self._by_head(op, self.v_norm, v)

    def _by_head(self, op: Op, norm: RMSNorm | UnweightedRMSNorm, x: ir.Value) -> ir.Value:
        """X [1, S, heads*D], normalized over D."""
        return merge_heads(op, norm(op, split_heads(op, x, self.head_dim)))


class ScaledNorm(RMSNorm):
    """The norm of a router, whose weight is named `scale`."""

    def _weight(self, op: Op) -> StoredTensor:
        return self.weights.take("scale", (self.size,), op.dtype)


class NormedRouter(Router):
    """A router with a norm of its own, and a factor for the share of each expert."""

    def __init__(self, config: Config, weights: Weights, routing: Routing) -> None:
        super().__init__(weights / "proj", config.hidden_size, routing)
        self.own = weights
        self.norm = ScaledNorm(weights, config.hidden_size, config.rms_norm_eps)

    def __call__(self, op: Op, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """X [1, S, H] -> ids int64 [1, S, K] and their shares [1, S, K]."""
        rows = op.Mul(self.norm(op, x), op.constant(self.hidden**-0.5, op.dtype))
        return super().__call__(op, rows)

    def factors(self, op: Op) -> ir.Value:
        """In the activations' type, [E]."""
        stored = self.own.take("per_expert_scale", (self.routing.experts,), op.dtype)
        return op.cast(op.parameter(stored), op.dtype)


def _stack(weights: Weights, hidden: int, routing: Routing) -> Stack:
    """Experts in one tensor; quantized ones are separate, or have one tensor per projection."""
    sizes = hidden, routing.size
    if weights.info("gate_up_proj") is None:
        return experts_of(weights, routing.experts, sizes)
    return JoinedExperts(
        gate_up=(weights, "gate_up_proj"),
        down=(weights, "down_proj"),
        experts=routing.experts,
        sizes=sizes,
    )


class DecoderLayer:
    """Gemma 2's block, an embedding for this layer after it, and a factor.

    Experts, if any, are added to the MLP before the norm that follows it.
    """

    attention: type[Attention] = Attention

    def __init__(self, config: Config, weights: Weights, layer: int) -> None:
        hidden, epsilon = config.hidden_size, config.rms_norm_eps
        self.weights, self.per_layer_size = weights, config.per_layer_size
        self.activation = config.activation
        self.self_attn = self.attention(config, weights / "self_attn", layer)
        is_wide = config.has_double_wide_mlp and self.self_attn.is_shared
        self.mlp = GatedMLP(
            weights=weights / "mlp",
            size=hidden,
            inner_size=config.intermediate_size * (2 if is_wide else 1),
            bias=False,
            activation=config.activation,
        )

        def norm(name: str) -> RMSNorm:
            return RMSNorm(weights / name, hidden, epsilon)

        self.input_layernorm = norm("input_layernorm")
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")
        self.experts: Mixture | None = None
        if routing := config.routing:
            self.post_feedforward_layernorm_1 = norm("post_feedforward_layernorm_1")
            self.experts = Mixture(
                route=NormedRouter(config, weights / "router", routing),
                stack=_stack(weights / "experts", hidden, routing),
                routing=routing,
                around=(norm("pre_feedforward_layernorm_2"), norm("post_feedforward_layernorm_2")),
            )
        if size := config.per_layer_size:
            self.per_layer_input_gate = Linear(
                weights / "per_layer_input_gate", hidden, size, bias=False
            )
            self.per_layer_projection = Linear(
                weights / "per_layer_projection", size, hidden, bias=False
            )
            self.post_per_layer_input_norm = norm("post_per_layer_input_norm")

    def forward(self, op: Op, x: ir.Value, state: PassState, layer: int) -> ir.Value:
        """X [1, S, H] -> [1, S, H]."""
        attended = self.self_attn.forward(op, self.input_layernorm(op, x), state, layer)
        x = op.Add(x, self.post_attention_layernorm(op, attended))
        x = op.Add(x, self.post_feedforward_layernorm(op, self._feed_forward(op, x)))
        if self.per_layer_size:
            gate = activate(op, self.per_layer_input_gate(op, x), self.activation)
            added = self.per_layer_projection(op, op.Mul(gate, state.shared[input_name(layer)]))
            x = op.Add(x, self.post_per_layer_input_norm(op, added))
        factor = op.parameter(self.weights.take("layer_scalar", (1,), op.dtype))
        return op.Mul(x, op.cast(factor, op.dtype))

    def _feed_forward(self, op: Op, x: ir.Value) -> ir.Value:
        y = self.mlp(op, self.pre_feedforward_layernorm(op, x))
        if self.experts is None:
            return y
        return op.Add(self.post_feedforward_layernorm_1(op, y), self.experts(op, x))


def input_name(layer: int) -> str:
    """Name of a layer's embedding of all tokens among the shared values."""
    return f"per_layer_inputs.{layer}"


class PerLayerInputs:
    """Embeddings of the tokens for each layer: of a table, and projected from their embedding."""

    def __init__(self, config: SharedKVConfig, weights: Weights) -> None:
        self.num_layers, self.size = len(config.layer_kinds), config.per_layer_size
        width = self.num_layers * self.size
        self.scale = config.hidden_size**-0.5
        self.embed_tokens_per_layer = Embedding(
            weights=weights / "embed_tokens_per_layer",
            vocab_size=config.per_layer_vocab_size,
            size=width,
            scale=self.size**0.5,
        )
        self.per_layer_model_projection = Linear(
            weights / "per_layer_model_projection", config.hidden_size, width, bias=False
        )
        self.per_layer_projection_norm = RMSNorm(
            weights / "per_layer_projection_norm", self.size, config.rms_norm_eps
        )

    def __call__(self, op: Op, input_ids: ir.Value, x: ir.Value) -> tuple[ir.Value, ...]:
        """Token ids int64 [1, S] and their embeddings [1, S, H] -> L times [1, S, P]."""
        projected = op.Mul(
            self.per_layer_model_projection(op, x), op.constant(self.scale, op.dtype)
        )
        by_layer = self.per_layer_projection_norm(op, split_heads(op, projected, self.size))
        both = op.Add(merge_heads(op, by_layer), self.embed_tokens_per_layer(op, input_ids))
        scaled = op.Mul(both, op.constant(2**-0.5, op.dtype))
        count = self.num_layers
        if count == 1:
            return (scaled,)
        return op.outputs(count, "Split", scaled, axis=-1, num_outputs=count)


class Model(gemma2.Model):
    """Gemma 2's model with such blocks and per-layer embeddings."""

    final_norm = RMSNorm

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.pad_token_id = config.pad_token_id
        is_token = 0 <= config.pad_token_id < config.vocab_size
        if config.images is not None and not is_token:
            raise UnsupportedModelError(
                f"config.json: pad_token_id = {config.pad_token_id} is no token of the model",
                hint=REMEDY,
            )
        self.per_layer_inputs = (
            PerLayerInputs(config, weights / "model") if config.per_layer_size else None
        )

    def make_layer(self, config: DecoderConfig, weights: Weights, index: int) -> llama.Layer:
        """See `llama.Model`."""
        assert isinstance(config, Config)
        return DecoderLayer(config, weights, index)

    def embed(self, op: Op, input_ids: ir.Value, state: PassState) -> ir.Value:
        """See `llama.Model`; the embeddings for each layer are shared values."""
        x = super().embed(op, input_ids, state)
        if self.per_layer_inputs is not None:
            if state.images is not None:
                input_ids = state.images.text_ids(op, input_ids, self.pad_token_id)
            for layer, value in enumerate(self.per_layer_inputs(op, input_ids, x)):
                state.shared[input_name(layer)] = value
        return x
