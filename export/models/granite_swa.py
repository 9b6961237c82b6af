"""Granite with windows in most layers, attention sinks, and a RoPE base of each layer."""

from __future__ import annotations

import numpy as np

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.layer_types import (
    FULL,
    SLIDING,
    AttentionKind,
    check_length,
    read_layer_types,
    read_window,
    window_of,
)
from edgellm.export.config.reader import REMEDY, ConfigReader
from edgellm.export.config.rope import Rope, read_parameters, rope_of
from edgellm.export.models import gpt_oss, granite

TINY = {
    **granite.TINY,
    "model_type": "granite_swa",
    "num_hidden_layers": 4,
    "sliding_window": 12,
    "layer_rope_theta": [0, 1e4, 1e4, 500.0],
}


class Config(granite.Config):
    """The config of Granite with windows."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> DecoderConfig:
        """Read config.json."""
        reader.assume(tie_word_embeddings=True, num_key_value_heads=4, sliding_window=128)
        config = cls.granite(reader, mlp_bias=reader.read("mlp_bias", bool, False))
        return config.attending(read_kinds(reader, config))


def read_kinds(reader: ConfigReader, config: DecoderConfig) -> tuple[AttentionKind, ...]:
    """Attention of each layer: its window, and its RoPE by `layer_rope_theta`."""
    layers = config.num_hidden_layers
    usual = [SLIDING if layer % 4 else FULL for layer in range(layers)]
    types = read_layer_types(reader, usual)
    window, thetas = read_window(reader, types), _read_thetas(reader, layers)
    parameters, longest = read_parameters(reader), config.max_position_embeddings
    parameters.pop("rope_theta", None)
    # Attention with sinks applies RoPE in all layers; angles of zero rotate nothing.
    ropes = {0.0: Rope(inv_freq=np.zeros(config.head_dim // 2, np.float32))}
    for theta in {*thetas} - ropes.keys():
        own = {**parameters, "rope_theta": theta}
        ropes[theta] = rope_of(reader, own, config.head_dim, longest)
    return tuple(
        AttentionKind(ropes[theta], window_of(kind, window))
        for kind, theta in zip(types, thetas, strict=True)
    )


def _read_thetas(reader: ConfigReader, layers: int) -> list[float]:
    """The base of each layer's RoPE, 0: NoPE."""
    theta = reader.read("rope_theta", float, 1e4)
    base = read_parameters(reader).get("rope_theta")
    found = reader.read("layer_rope_theta", list, [theta if base is None else base] * layers)
    check_length(reader, "layer_rope_theta", found)
    if unknown := [each for each in found if type(each) not in (int, float)]:
        raise UnsupportedModelError(
            f"config.json: layer_rope_theta has {unknown[0]!r}, which is no number",
            hint=REMEDY,
        )
    return [float(each) for each in found]


class DecoderLayer(granite.DecoderLayer):
    """Granite's block with attention sinks."""

    attention = gpt_oss.Attention


class Model(granite.Model):
    """Granite's model with such blocks."""

    layer = DecoderLayer
