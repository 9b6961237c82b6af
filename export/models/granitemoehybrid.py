"""Granite 4, dense: Granite 3 with a fused network; layers of experts and of Mamba are refused."""

from __future__ import annotations

from edgellm.contract import UnsupportedModelError
from edgellm.export.attention_kinds import AttentionKind, check_length
from edgellm.export.config import ConfigReader
from edgellm.export.decoder_config import DecoderConfig
from edgellm.export.layers.mlp import MLP, FusedGatedMLP
from edgellm.export.models import granite
from edgellm.export.rope import read_rope
from edgellm.export.weights import Weights

TINY = {
    **{key: value for key, value in granite.TINY.items() if key != "intermediate_size"},
    "model_type": "granitemoehybrid",
    "shared_intermediate_size": 80,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "layer_types": ["attention"] * 3,
    "position_embedding_type": "rope",
    "mamba_n_heads": 8,
}
_ATTENTION = ("attention", "full_attention")
# Of experts and of recurrent layers, which no layer is; of training.
_UNREAD = (
    "init_method", "intermediate_size", "mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv",
    "mamba_d_head", "mamba_d_state", "mamba_expand", "mamba_n_groups", "mamba_n_heads",
    "mamba_proj_bias", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef",
    "time_step_limit",
)  # fmt: skip


class Config(granite.Config):
    """Granite 4's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.skip(*_UNREAD)
        reader.assume(num_local_experts=8, shared_intermediate_size=1024)
        if experts := reader.read("num_local_experts", int, 0):
            raise UnsupportedModelError(
                f"config.json: num_local_experts = {experts}: only dense models are supported"
            )
        kinds = reader.read("layer_types", list, reader.read("layers_block_type", list, ["mamba"]))
        if recurrent := [kind for kind in kinds if kind not in _ATTENTION]:
            raise UnsupportedModelError(
                f"config.json: layer_types names {recurrent[0]!r}, which is not supported",
                hint="Granite 4 models without -h- in their names have attention alone",
            )
        check_length(reader, "layer_types", kinds)
        reader.expect("normalization_function", "rmsnorm")
        config = cls.granite(reader, "shared_intermediate_size", mlp_bias=False)
        kind = reader.optional("position_embedding_type", str)
        reader.expect("position_embedding_type", "rope", "nope")
        rope = read_rope(reader, config.head_dim, config.max_position_embeddings)
        layer = AttentionKind(rope if kind == "rope" else None)
        return config.attending((layer,) * config.num_hidden_layers)


class DecoderLayer(granite.DecoderLayer):
    """Granite's block with a network of another name."""

    mlp_name = "shared_mlp"

    def feed_forward(self, config: DecoderConfig, weights: Weights) -> MLP:
        """Gate and up are one layer."""
        return FusedGatedMLP(
            weights,
            config.hidden_size,
            config.intermediate_size,
            activation=config.activation,
            names=("input_linear", "output_linear"),
        )


class Model(granite.Model):
    """Granite's model with such blocks."""

    layer = DecoderLayer
