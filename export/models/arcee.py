"""Arcee AFM: Llama with a plain feed-forward network and squared ReLU."""

from __future__ import annotations

from typing import ClassVar

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.layers.mlp import MLP, FeedForward
from edgellm.export.models import llama

TINY = {
    **llama.TINY, "model_type": "arcee", "hidden_act": "relu2",
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                        "original_max_position_embeddings": 32},
}  # fmt: skip


class Config(DecoderConfig):
    """Arcee's config."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.assume(hidden_act="relu2")
        bias, mlp_bias = (reader.read(key, bool, False) for key in ("attention_bias", "mlp_bias"))
        return cls.read(reader, qkv_bias=bias, o_proj_bias=bias, mlp_bias=mlp_bias)


class DecoderLayer(llama.DecoderLayer):
    """Llama's block without a gate."""

    feed_forward_names: ClassVar = ("up_proj", "down_proj")

    def feed_forward(self, config: DecoderConfig, weights: Weights) -> MLP:
        """Up projection, activation, down projection."""
        hidden, inner = config.hidden_size, config.intermediate_size
        first, second = (weights / name for name in self.feed_forward_names)
        sizes = (hidden, inner, hidden)
        return FeedForward(
            first=first,
            second=second,
            sizes=sizes,
            activation=config.activation,
            bias=config.mlp_bias,
        )


class Model(llama.Model):
    """Llama's model with Arcee's blocks."""

    layer = DecoderLayer
