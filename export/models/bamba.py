"""Bamba: Mamba 2 in most layers, attention with RoPE in half of each head in the others."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import AttentionKind
from edgellm.export.config.reader import REMEDY, ConfigReader
from edgellm.export.config.rope import RopeTraits, read_rope
from edgellm.export.layers.mamba import NO_MAMBA, MambaSizes
from edgellm.export.models import granitemoehybrid, llama

TINY = {
    **llama.TINY,
    "model_type": "bamba",
    "tie_word_embeddings": False,
    "attn_layer_indices": [1],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
}
_PARTIAL = 0.5  # of a head, whatever the config's own partial_rotary_factor
_UNREAD = ("num_logits_to_keep", "z_loss_coefficient")  # for training


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(DecoderConfig):
    """Bamba's config."""

    mamba: MambaSizes = NO_MAMBA

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.skip(*_UNREAD)
        reader.assume(num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=262144)
        reader.expect("hidden_act", "silu", "swish")  # also of Mamba's convolution
        reader.expect("partial_rotary_factor", _PARTIAL)
        bias = reader.read("attention_bias", bool, False)
        config = cls.read(
            reader,
            rope=None,
            qkv_bias=bias,
            o_proj_bias=bias,
            mlp_bias=reader.read("mlp_bias", bool, False),
            is_recurrent=True,
        )
        inner = reader.positive("mamba_expand", 2) * config.hidden_size
        config = replace(config, mamba=MambaSizes.read(reader, inner, "mamba_proj_bias"))
        reader.expect("attn_rotary_emb", int(_PARTIAL * config.head_dim))  # an older key
        traits = RopeTraits(partial=_PARTIAL)
        rope = read_rope(reader, config.head_dim, config.max_position_embeddings, traits)
        attends, layers = AttentionKind(rope), range(config.num_hidden_layers)
        indices = reader.read("attn_layer_indices", list, [])
        if not any(layer in indices for layer in layers):
            raise UnsupportedModelError(
                "config.json: attn_layer_indices names no layer, so no layer attends",
                hint=REMEDY,
            )
        return config.attending(tuple(attends if layer in indices else None for layer in layers))


class DecoderLayer(llama.DecoderLayer):
    """Llama's block."""

    norm_names = "input_layernorm", "pre_ff_layernorm"
    mlp_name = "feed_forward"


class MambaLayer(DecoderLayer):
    """The block with Mamba 2."""

    attention = granitemoehybrid.Mamba  # type: ignore[assignment]
    attention_name = "mamba"


class Model(llama.Model):
    """Llama's model with such blocks."""

    norm_name = "final_layernorm"

    def make_layer(self, config: DecoderConfig, weights: Weights, index: int) -> llama.Layer:
        """A block of the layer's type."""
        kind = MambaLayer if config.kinds[index] is None else DecoderLayer
        return kind(config, weights)
