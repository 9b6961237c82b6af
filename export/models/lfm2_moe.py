"""LFM2 8B-A1B: LFM2 with experts after the first layers, chosen by corrected shares."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.export.checkpoints.experts.stacked import experts_of
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.layers.experts import NO_ROUTING, Mixture, Routing, SigmoidRouter
from edgellm.export.layers.mlp import MLP
from edgellm.export.models import lfm2

TINY = {
    **{key: value for key, value in lfm2.TINY.items() if not key.startswith(("block", "full"))},
    "model_type": "lfm2_moe",
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "moe_intermediate_size": 48,
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(lfm2.Config):
    """LFM2's config with experts."""

    routing: Routing = NO_ROUTING
    dense: int = 0  # layers without experts, the first ones
    has_bias: bool = True  # for the choice of experts

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.assume(
            tie_word_embeddings=reader.read("tie_embedding", bool, True),
            norm_eps=1e-5,
            max_position_embeddings=128000,
            num_experts=32,
            num_experts_per_tok=4,
            moe_intermediate_size=1792,
        )
        reader.expect("hidden_act", "silu", "swish")  # transformers ignores it
        routing = Routing.read(
            reader,
            experts="num_experts",
            size="moe_intermediate_size",
            normalizes=reader.read("norm_topk_prob", bool, True),
            added=1e-6,
            scale=reader.read("routed_scaling_factor", float, 1.0),
        )
        return cls.convolving(
            reader,
            routing=routing,
            dense=reader.read("num_dense_layers", int, 2),
            has_bias=reader.read("use_expert_bias", bool, True),
        )


class DecoderLayer(lfm2.DecoderLayer):
    """LFM2's block, with experts after the first layers."""

    def network(self, config: DecoderConfig, weights: Weights, index: int) -> MLP:
        """A dense MLP or experts."""
        assert isinstance(config, Config)
        if index < config.dense:
            return super().network(config, weights, index)
        hidden, routing = config.hidden_size, config.routing
        bias = (weights, "expert_bias") if config.has_bias else None
        router = SigmoidRouter(weights=weights / "gate", hidden=hidden, routing=routing, bias=bias)
        sizes, names = (hidden, routing.size), ("w1", "w3", "w2")
        stack = experts_of(weights / "experts", routing.experts, sizes, names)
        return Mixture(route=router, stack=stack, routing=routing)


class Model(lfm2.Model):
    """LFM2's model with such blocks."""

    block = DecoderLayer
