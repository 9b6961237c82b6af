"""OLMo 3: OLMo 2 with windows in three of four layers, which have a separate RoPE."""

from __future__ import annotations

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import (
    FULL,
    SLIDING,
    AttentionKind,
    every,
    read_layer_types,
    read_window,
    window_of,
)
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import read_ropes
from edgellm.export.models import olmo2
from edgellm.export.models.olmo2 import Model

__all__ = ["TINY", "Config", "Model"]

_YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "attention_factor": 1.2,
         "original_max_position_embeddings": 32}  # fmt: skip
TINY = {
    **olmo2.TINY,
    "model_type": "olmo3",
    "num_hidden_layers": 4,
    "sliding_window": 12,
    "rope_parameters": {FULL: _YARN, SLIDING: {"rope_type": "default", "rope_theta": 5e5}},
}
_THETA = 5e5


class Config(DecoderConfig):
    """OLMo 3's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.assume(sliding_window=4096)
        if reader.optional("rope_theta", float) not in (None, _THETA):
            raise UnsupportedModelError(  # transformers applies it to full attention layers only
                "config.json: rope_theta does not say for which layers it is",
                hint="name it in rope_parameters, for each type of layer",
            )
        bias = reader.read("attention_bias", bool, False)
        config = cls.read(reader, rope=None, qkv_bias=bias, o_proj_bias=bias)
        types = read_layer_types(reader, every(4, config.num_hidden_layers))
        window = read_window(reader, types)
        thetas = {FULL: _THETA, SLIDING: _THETA}
        ropes = read_ropes(reader, thetas, config.head_dim, config.max_position_embeddings)
        return config.attending(
            tuple(AttentionKind(ropes[kind], window_of(kind, window)) for kind in types)
        )
