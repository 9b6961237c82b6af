"""gpt-oss 20B and 120B: experts with clamped gates, attention sinks, alternating windows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.experts.gpt_oss import InterleavedExperts
from edgellm.export.checkpoints.experts.stacked import StackedExperts, is_stacked
from edgellm.export.checkpoints.experts.weights import Stack
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import (
    FULL,
    SLIDING,
    AttentionKind,
    read_layer_types,
    read_window,
    window_of,
)
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import Rope, read_parameters, rope_of
from edgellm.export.layers.attention import PassState, Scores
from edgellm.export.layers.experts import NO_ROUTING, BiasedRouter, Gating, Mixture, Routing
from edgellm.export.models import llama
from edgellm.export.onnx.builder import Op

TINY = {
    **llama.TINY, "model_type": "gpt_oss", "tie_word_embeddings": False, "head_dim": 32,
    "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 12, "swiglu_limit": 0.7,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 4.0, "beta_fast": 32.0,
                        "beta_slow": 1.0, "truncate": False,
                        "original_max_position_embeddings": 32},
}  # fmt: skip
_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(DecoderConfig):
    """The config of gpt-oss."""

    routing: Routing = NO_ROUTING

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.assume(
            sliding_window=128, head_dim=64, num_key_value_heads=8, attention_bias=True,
            swiglu_alpha=1.702, swiglu_limit=7.0,
        )  # fmt: skip
        reader.skip("initial_context_length")  # in rope_parameters, too
        bias = reader.read("attention_bias", bool, False)
        routing = Routing.read(reader)
        reader.expect("experts_per_token", routing.top_k)
        alpha, limit = (reader.read(key, float) for key in ("swiglu_alpha", "swiglu_limit"))
        if limit <= 0:
            raise UnsupportedModelError(f"config.json: swiglu_limit = {limit} is not positive")
        routing = replace(routing, gating=Gating(alpha=alpha, limit=limit, offset=1.0))
        config = cls.read(reader, rope=None, qkv_bias=bias, o_proj_bias=bias, routing=routing)
        types = read_layer_types(
            reader, [FULL if index % 2 else SLIDING for index in range(config.num_hidden_layers)]
        )
        window = read_window(reader, types)
        rope = _read_rope(reader, config)
        return config.attending(
            tuple(AttentionKind(rope, window_of(kind, window)) for kind in types)
        )


def _read_rope(reader: ConfigReader, config: DecoderConfig) -> Rope:
    parameters = read_parameters(reader) or dict(_ROPE)
    theta = reader.read("rope_theta", float, 1.5e5)
    parameters["rope_theta"] = parameters.get("rope_theta") or theta
    return rope_of(reader, parameters, config.head_dim, config.max_position_embeddings)


class Attention(llama.Attention):
    """Self-attention with a sink per head: a score in the softmax without a value."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, input_size: int | None = None
    ) -> None:
        super().__init__(config, weights, input_size)
        self.weights = weights

    def attend(
        self, op: Op, state: PassState, layer: int, q: ir.Value, k: ir.Value, v: ir.Value
    ) -> ir.Value:
        """Q [1, S, heads*D], k and v [1, S, kv_heads*D] -> [1, S, heads*D]."""
        heads = self.config.num_attention_heads
        sinks = op.parameter(self.weights.take("sinks", (heads,), op.dtype))
        scores = Scores(scale=self.config.attention_scale, sinks=op.cast(sinks, op.dtype))
        return state.attend(layer, q, k, v, heads, scores=scores)


class DecoderLayer(llama.DecoderLayer):
    """Llama's block with sinks and experts."""

    attention = Attention

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        hidden, routing, mlp = config.hidden_size, config.routing, weights / "mlp"
        own, sizes = mlp / "experts", (hidden, routing.size)
        stack: Stack = InterleavedExperts(own, routing.experts, sizes)
        if is_stacked(own):
            stack = StackedExperts(
                weights=own, experts=routing.experts, sizes=sizes, has_biases=True
            )
        router = BiasedRouter(mlp / "router", hidden, routing)
        self.mlp = Mixture(route=router, stack=stack, routing=routing)


class Model(llama.Model):
    """Llama's model with the blocks of gpt-oss."""

    layer = DecoderLayer
