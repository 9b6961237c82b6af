"""Mixtral 8x7B and 8x22B: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.export.checkpoints.experts.stacked import experts_of
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import RopeTraits
from edgellm.export.layers.experts import NO_ROUTING, Mixture, Router, Routing
from edgellm.export.layers.mlp import MLP
from edgellm.export.models import llama

TINY = {
    **llama.TINY,
    "model_type": "mixtral",
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "sliding_window": 12,
}
_NAMES = ("w1", "w3", "w2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(DecoderConfig):
    """Mixtral's config."""

    routing: Routing = NO_ROUTING

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.skip("router_jitter_noise")  # for training
        window = reader.optional("sliding_window", int)
        return cls.read(
            reader, rope=RopeTraits(theta=1e6), window=window, routing=Routing.read(reader)
        )


class DecoderLayer(llama.DecoderLayer):
    """Llama's block with experts."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.mlp = _mixture(config, weights / "block_sparse_moe")


def _mixture(config: Config, weights: Weights) -> MLP:
    hidden, routing = config.hidden_size, config.routing
    sizes = hidden, routing.size
    stack = experts_of(weights / "experts", routing.experts, sizes, _NAMES)
    return Mixture(route=Router(weights / "gate", hidden, routing), stack=stack, routing=routing)


class Model(llama.Model):
    """Llama's model with Mixtral's blocks."""

    layer = DecoderLayer
