"""Granite 3 1B-A400M and 3B-A800M: Granite with experts."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.export.checkpoints.experts.stacked import experts_of, is_stacked
from edgellm.export.checkpoints.experts.weights import JoinedExperts, Stack
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import PLAIN_ROPE
from edgellm.export.layers.experts import NO_ROUTING, Mixture, Router, Routing
from edgellm.export.models import granite

TINY = {
    **granite.TINY,
    "model_type": "granitemoe",
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(granite.Config):
    """Granite's config with experts."""

    routing: Routing = NO_ROUTING

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        return cls.granite(reader, mlp_bias=False, rope=PLAIN_ROPE, routing=Routing.read(reader))


class DecoderLayer(granite.DecoderLayer):
    """Granite's block with experts."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        hidden, routing, mlp = config.hidden_size, config.routing, weights / "block_sparse_moe"
        router = Router(mlp / "router.layer", hidden, routing)
        self.mlp = Mixture(route=router, stack=stack_of(mlp, hidden, routing), routing=routing)


def stack_of(mlp: Weights, hidden: int, routing: Routing) -> Stack:
    """Experts in one tensor; quantized ones are separate, or have one tensor per projection."""
    count, sizes, apart = routing.experts, (hidden, routing.size), mlp / "experts"
    if is_stacked(apart) or (apart / "0.gate_proj").info("weight") is not None:
        return experts_of(apart, count, sizes)
    gate_up, down = (mlp / "input_linear", "weight"), (mlp / "output_linear", "weight")
    if apart.info("gate_up_proj") is not None:
        gate_up, down = (apart, "gate_up_proj"), (apart, "down_proj")
    return JoinedExperts(
        gate_up=gate_up,
        down=down,
        experts=count,
        sizes=sizes,
    )


class Model(granite.Model):
    """Granite's model with its blocks of experts."""

    layer = DecoderLayer
