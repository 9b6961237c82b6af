"""Granite 4: Granite 3 with a shared MLP next to experts, and Mamba 2 layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgellm.core.errors import UnsupportedModelError
from edgellm.core.graph_io import ROWS
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import AttentionKind, check_length
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import read_rope
from edgellm.export.layers.experts import Mixture, Router, Routing
from edgellm.export.layers.mamba import NO_MAMBA, Mamba2, MambaSizes
from edgellm.export.layers.mlp import MLP, FusedGatedMLP, GatedMLP
from edgellm.export.models import granite, granitemoe, llama

TINY = {
    **granite.TINY,
    "model_type": "granitemoehybrid",
    "intermediate_size": 48,
    "shared_intermediate_size": 80,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "layer_types": ["mamba", "attention", "mamba"],
    "position_embedding_type": "nope",
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
}
_ATTENTION = ("attention", "full_attention")
_RECURRENT = ("mamba", "linear_attention")
_UNREAD = ("init_method", "output_router_logits", "router_aux_loss_coef")  # for training


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(granitemoe.Config):
    """Granite 4's config."""

    mamba: MambaSizes = NO_MAMBA
    has_experts: bool = False

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.skip(*_UNREAD)
        reader.assume(num_local_experts=8, shared_intermediate_size=1024)
        types = _layer_types(reader)
        reader.expect("normalization_function", "rmsnorm")
        config = cls.granite(reader, "shared_intermediate_size", mlp_bias=False)
        assert isinstance(config, Config)
        if reader.read("num_local_experts", int, 0):
            config = replace(config, has_experts=True, routing=Routing.read(reader))
        reader.skip("intermediate_size", "num_experts_per_tok")  # of experts
        kind = reader.optional("position_embedding_type", str)
        reader.expect("position_embedding_type", "rope", "nope")
        rope = read_rope(reader, config.head_dim, config.max_position_embeddings)
        attends = AttentionKind(rope if kind == "rope" else None)
        if any(each in _RECURRENT for each in types):
            inner = reader.positive("mamba_expand", 2) * config.hidden_size
            sizes = MambaSizes.read(reader, inner, "mamba_proj_bias")
            config = replace(config, mamba=sizes, is_recurrent=True)
        reader.skip(*(f"mamba_{name}" for name in _SIZES), "time_step_limit")
        return config.attending(tuple(attends if each in _ATTENTION else None for each in types))


_SIZES = (
    "chunk_size",
    "conv_bias",
    "d_conv",
    "d_head",
    "d_state",
    "expand",
    "n_groups",
    "n_heads",
    "proj_bias",
)


def _layer_types(reader: ConfigReader) -> list[str]:
    layers = reader.positive("num_hidden_layers")
    types = reader.read("layer_types", list, reader.read("layers_block_type", list, []))
    types = types or [_RECURRENT[0]] * layers
    if unknown := [each for each in types if each not in (*_ATTENTION, *_RECURRENT)]:
        raise UnsupportedModelError(
            f"config.json: layer_types names {unknown[0]!r}, which is not supported",
            hint=f"supported: {_ATTENTION[0]}, {_RECURRENT[0]}",
        )
    check_length(reader, "layer_types", types)
    if not any(each in _ATTENTION for each in types):
        raise UnsupportedModelError("config.json: no layer attends, which is not supported")
    return types


class DecoderLayer(granite.DecoderLayer):
    """Granite's block with a shared MLP and experts."""

    mlp_name = "shared_mlp"

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        if config.has_experts:
            hidden, routing, mlp = config.hidden_size, config.routing, weights / "block_sparse_moe"
            router = Router(mlp / "router.layer", hidden, routing)
            stack = granitemoe.stack_of(mlp, hidden, routing)
            self.mlp = Mixture(route=router, stack=stack, routing=routing, shared=self.mlp)

    def feed_forward(self, config: DecoderConfig, weights: Weights) -> MLP:
        """MLP with gate and up as one layer, except in GGUF files."""
        size, inner_size = config.hidden_size, config.intermediate_size
        activation = config.activation
        if (weights / "gate_proj").info("weight") is not None:
            return GatedMLP(
                weights=weights,
                size=size,
                inner_size=inner_size,
                bias=False,
                activation=activation,
                names=("gate_proj", "up_proj", "output_linear"),
            )
        return FusedGatedMLP(
            weights=weights,
            size=size,
            inner_size=inner_size,
            activation=activation,
            names=("input_linear", "output_linear"),
        )


class Mamba(Mamba2):
    """Granite's Mamba 2."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(
            sizes=config.mamba,
            weights=weights,
            hidden=config.hidden_size,
            epsilon=config.rms_norm_eps,
            rows=ROWS,
        )


class MambaLayer(DecoderLayer):
    """The block with Mamba 2."""

    attention = Mamba  # type: ignore[assignment]
    attention_name = "mamba"


class Model(granite.Model):
    """Granite's model with such blocks."""

    def make_layer(self, config: DecoderConfig, weights: Weights, index: int) -> llama.Layer:
        """A block of the layer's type."""
        assert isinstance(config, Config)
        kind = MambaLayer if config.kinds[index] is None else DecoderLayer
        return kind(config, weights)
