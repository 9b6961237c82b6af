"""Granite with experts, windows in most layers, attention sinks, and an optional shared MLP."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import REMEDY, ConfigReader
from edgellm.export.layers.experts import Mixture, Router, Routing
from edgellm.export.layers.mlp import FusedGatedMLP
from edgellm.export.models import granite, granite_swa, granitemoe
from edgellm.export.models.granite_swa import read_kinds

TINY = {
    **granite_swa.TINY,
    "model_type": "granitemoe_swa",
    "tie_word_embeddings": False,
    "intermediate_size": 48,
    "shared_intermediate_size": 80,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(granitemoe.Config):
    """The config of Granite with experts and windows."""

    shared_size: int = 0  # intermediate size of the shared MLP; 0: none

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.assume(
            rms_norm_eps=1e-6, num_local_experts=8, num_experts_per_tok=2, sliding_window=128
        )
        shared = reader.read("shared_intermediate_size", int, 0)
        if shared < 0:
            raise UnsupportedModelError(
                f"config.json: shared_intermediate_size = {shared} is negative",
                hint=REMEDY,
            )
        routing = Routing.read(reader)
        config = cls.granite(reader, mlp_bias=False, routing=routing, shared_size=shared)
        return config.attending(read_kinds(reader, config))


class DecoderLayer(granite_swa.DecoderLayer):
    """Granite's block with sinks and experts."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        hidden, routing, mlp = config.hidden_size, config.routing, weights / "block_sparse_moe"
        shared = (
            FusedGatedMLP(
                weights=weights / "shared_mlp",
                size=hidden,
                inner_size=config.shared_size,
                activation=config.activation,
                names=("input_linear", "output_linear"),
            )
            if config.shared_size
            else None
        )
        self.mlp = Mixture(
            route=Router(mlp / "router", hidden, routing),
            stack=granitemoe.stack_of(mlp, hidden, routing),
            routing=routing,
            shared=shared,
        )


class Model(granite.Model):
    """Granite's model with such blocks."""

    layer = DecoderLayer
