"""Idefics3's encoder (arXiv 2408.12637): a SigLIP of tiles (2303.15343), pixel shuffle, projection.

Shapes: N tiles of E pixels a side, side = E / patch size, d width, H hidden size of the language
model. All tiles are full, so that patch i is at position i. In transformers this holds for all used
sides (16, 26, 27, 32); for some others rounding shifts a position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.core.errors import UnsupportedModelError
from edgellm.core.model_spec import VisionSpec
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.visual import (
    check_heads,
    language_size,
    read_activation,
    read_square,
    skip_training,
)
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.mlp import FeedForward
from edgellm.export.layers.norm import LayerNorm
from edgellm.export.layers.tiles import TileAttention, TilePatches, pixel_shuffle
from edgellm.export.onnx.builder import Op

TINY = {
    "model_type": "idefics3",
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 30,
        "patch_size": 7,
    },
    "text_config": {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
    },
    "scale_factor": 2,
    "image_token_id": 90,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The encoder's facts."""

    depth: int
    size: int  # d
    inner_size: int
    num_heads: int
    activation: str
    epsilon: float
    out_size: int  # H
    image_size: int  # E
    patch_size: int
    shuffle: int  # patches along a side of a token

    @classmethod
    def from_hf(cls, vision: ConfigReader, model: ConfigReader) -> Config:
        """Read `vision_config`, and the encoder's keys in the rest of config.json."""
        skip_training(vision)
        # The processor has its own file; base SigLIP differs in sizes only.
        for key in ("size", "max_image_size", "use_base_siglip", "tie_word_embeddings"):
            vision.optional(key, object)
        vision.expect("num_channels", 3)
        size = vision.positive("hidden_size", 1152)
        num_heads = vision.positive("num_attention_heads", 16)
        check_heads(size, num_heads)
        return cls(
            depth=vision.positive("num_hidden_layers", 12),
            size=size,
            inner_size=vision.positive("intermediate_size", 3072),
            num_heads=num_heads,
            activation=read_activation(vision, "hidden_act", "gelu_pytorch_tanh"),
            epsilon=vision.read("layer_norm_eps", float, 1e-6),
            out_size=language_size(model),
            image_size=read_square(vision, "image_size", 224),
            patch_size=read_square(vision, "patch_size", 32),
            shuffle=model.positive("scale_factor", 2),
        )

    def __post_init__(self) -> None:
        if self.side % self.shuffle or not self.side:
            raise UnsupportedModelError(
                f"config.json: {self.side} patches along a tile do not make tokens of "
                f"{self.shuffle} by {self.shuffle}"
            )

    @property
    def side(self) -> int:
        """Patches along a side of a tile."""
        return self.image_size // self.patch_size

    def spec(self, model_type: str, num_parameters: int) -> VisionSpec:
        """The spec for the manifest."""
        return VisionSpec(
            model_type=model_type,
            hidden_size=self.out_size,
            patch_size=self.patch_size,
            merge_size=self.shuffle,
            temporal_patch_size=1,
            window_size=0,
            position_grid=0,
            num_deepstack=0,
            image_size=self.image_size,
            tokens_per_tile=(self.side // self.shuffle) ** 2,
            num_parameters=num_parameters,
        )


class LayerConfig(Protocol):
    """The facts of a block."""

    @property
    def size(self) -> int:
        """Width d."""
        ...

    @property
    def inner_size(self) -> int:
        """Width of the feed-forward network."""
        ...

    @property
    def num_heads(self) -> int:
        """Heads of attention."""
        ...

    @property
    def activation(self) -> str:
        """That of the feed-forward network."""
        ...

    @property
    def epsilon(self) -> float:
        """That of the norms."""
        ...


class EncoderLayer:
    """Pre-norm transformer block."""

    def __init__(self, config: LayerConfig, weights: Weights) -> None:
        size, epsilon = config.size, config.epsilon
        self.layer_norm1 = LayerNorm(weights / "layer_norm1", size, epsilon)
        self.self_attn = TileAttention(
            weights=weights / "self_attn",
            size=size,
            num_heads=config.num_heads,
            bias=True,
            output="out_proj",
        )
        self.layer_norm2 = LayerNorm(weights / "layer_norm2", size, epsilon)
        first, second = weights / "mlp.fc1", weights / "mlp.fc2"
        sizes = size, config.inner_size, size
        self.mlp = FeedForward(
            first=first, second=second, sizes=sizes, activation=config.activation
        )

    def forward(self, op: Op, x: ir.Value) -> ir.Value:
        """X [N, side * side, d] -> the same shape."""
        x = op.Add(x, self.self_attn(op, self.layer_norm1(op, x)))
        return op.Add(x, self.mlp(op, self.layer_norm2(op, x)))


class Encoder:
    """SigLIP of tiles: patches with learned positions, blocks, final norm."""

    def __init__(self, config: Config, vision: Weights) -> None:
        self.config = config
        embeddings = vision / "embeddings"
        self.patch_embedding = TilePatches(
            embeddings / "patch_embedding", config.patch_size, config.size
        )
        self.position_embedding = embeddings / "position_embedding"
        self.layers = [
            EncoderLayer(config, vision / f"encoder.layers.{index}")
            for index in range(config.depth)
        ]
        self.post_layernorm = LayerNorm(vision / "post_layernorm", config.size, config.epsilon)

    def __call__(self, op: Op, tiles: ir.Value) -> ir.Value:
        """Append the encoder; tiles [N, 3, E, E] -> [N, side * side, d]."""
        config = self.config
        x = self.patch_embedding(op, tiles)
        with op.scope("position_embedding"):
            table = self.position_embedding.take("weight", (config.side**2, config.size), op.dtype)
            x = op.Add(x, op.cast(op.parameter(table), op.dtype))
        for index, layer in enumerate(self.layers):
            with op.scope(f"layers.{index}"):
                x = layer.forward(op, x)
        return self.post_layernorm(op, x)


class Model:
    """The encoder of tiles, pixel shuffle and projection."""

    parts = ("vision_model", "connector")

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config = config
        self.encoder = Encoder(config, weights / "vision_model")
        self.proj = Linear(
            weights / "connector.modality_projection.proj",
            config.size * config.shuffle**2,
            config.out_size,
            bias=False,
        )

    def forward(self, op: Op, inputs: Mapping[str, ir.Value]) -> list[ir.Value]:
        """Inputs by contract name -> tokens [N * tokens_per_tile, H]."""
        config = self.config
        x = self.encoder(op, inputs[graph_io.PIXEL_VALUES])
        x = pixel_shuffle(op, x, config.side, config.shuffle, config.size)
        return [op.Reshape(self.proj(op, x), op.constant([-1, config.out_size]))]
