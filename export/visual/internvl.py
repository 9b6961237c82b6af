"""InternVL3's encoder in transformers' layout (arXiv 2504.10479): an InternViT of tiles, projector.

Shapes: N tiles of E pixels a side, side = E / patch size, d width, H hidden size of the language
model. A class token stands before the patches of a tile and is dropped after the last layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.visual import (
    check_heads,
    language_size,
    read_activation,
    read_square,
    skip_training,
)
from edgellm.export.layers.mlp import FeedForward
from edgellm.export.layers.norm import LayerNorm, RMSNorm
from edgellm.export.layers.tiles import TileAttention, TilePatches, pixel_shuffle
from edgellm.export.onnx.builder import Op
from edgellm.export.visual import idefics3

TINY = {
    "model_type": "internvl",
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "attention_bias": True,
        "image_size": [28, 28],
        "patch_size": [7, 7],
    },
    "text_config": {
        "model_type": "qwen2",
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
    "image_token_id": 90,
    "image_seq_length": 4,
}
_QK_EPSILON, _PROJECTOR_EPSILON = 1e-6, 1e-5  # no config has them


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(idefics3.Config):
    """The encoder's facts."""

    qkv_bias: bool
    qk_norm: bool
    rms_norm: bool
    positions: bool  # learned positions are added to the patches
    final_norm: bool
    projector_activation: str

    @classmethod
    def from_hf(cls, vision: ConfigReader, model: ConfigReader) -> Config:
        """Read `vision_config`, and the encoder's keys in the rest of config.json."""
        skip_training(vision)
        vision.optional("layer_scale_init_value", float)  # the scales are in the checkpoint
        vision.expect("num_channels", 3)
        vision.expect("use_mask_token", False)
        vision.expect("norm_type", "layer_norm", "rms_norm")
        model.expect("vision_feature_layer", -1)
        model.expect("vision_feature_select_strategy", "default")
        size = vision.positive("hidden_size", 1024)
        num_heads = vision.positive("num_attention_heads", 16)
        check_heads(size, num_heads)
        return cls(
            depth=vision.positive("num_hidden_layers", 24),
            size=size,
            inner_size=vision.positive("intermediate_size", 4096),
            num_heads=num_heads,
            activation=read_activation(vision, "hidden_act", "gelu"),
            epsilon=vision.read("layer_norm_eps", float, 1e-6),
            out_size=language_size(model),
            image_size=read_square(vision, "image_size", 448),
            patch_size=read_square(vision, "patch_size", 14),
            shuffle=_read_shuffle(model),
            qkv_bias=vision.read("attention_bias", bool, False),
            qk_norm=vision.read("use_qk_norm", bool, False),
            rms_norm=vision.read("norm_type", str, "layer_norm") == "rms_norm",
            positions=vision.read("use_absolute_position_embeddings", bool, True),
            final_norm=not vision.read("use_mean_pooling", bool, True),
            projector_activation=read_activation(model, "projector_hidden_act", "gelu"),
        )


def _read_shuffle(model: ConfigReader) -> int:
    """Patches along a side of a token; the config has the inverse."""
    ratio = model.read("downsample_ratio", float, 0.5)
    if ratio <= 0 or (1 / ratio) % 1:
        raise UnsupportedModelError(f"config.json: downsample_ratio = {ratio} is not 1 / n")
    return int(1 / ratio)


class Attention(TileAttention):
    """Self-attention, in large encoders with normalized queries and keys."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(
            weights=weights,
            size=config.size,
            num_heads=config.num_heads,
            bias=config.qkv_bias,
            output="projection_layer",
        )
        self.norms = (
            [RMSNorm(weights / name, config.size, _QK_EPSILON) for name in ("q_norm", "k_norm")]
            if config.qk_norm
            else []
        )

    def normalize(self, op: Op, q: ir.Value, k: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Normalize queries and keys over all heads."""
        if not self.norms:
            return q, k
        return self.norms[0](op, q), self.norms[1](op, k)


class Layer:
    """Pre-norm transformer block with scaled branches (layer scale)."""

    def __init__(self, config: Config, weights: Weights) -> None:
        size, norm = config.size, RMSNorm if config.rms_norm else LayerNorm
        self.weights = weights
        self.size = size
        self.layernorm_before = norm(weights / "layernorm_before", size, config.epsilon)
        self.attention = Attention(config, weights / "attention")
        self.layernorm_after = norm(weights / "layernorm_after", size, config.epsilon)
        first, second = weights / "mlp.fc1", weights / "mlp.fc2"
        sizes = size, config.inner_size, size
        self.mlp = FeedForward(
            first=first, second=second, sizes=sizes, activation=config.activation
        )

    def forward(self, op: Op, x: ir.Value) -> ir.Value:
        """X [N, 1 + side * side, d] -> the same shape."""
        branch = self.attention(op, self.layernorm_before(op, x))
        x = op.Add(x, self._scale(op, branch, "lambda_1"))
        branch = self.mlp(op, self.layernorm_after(op, x))
        return op.Add(x, self._scale(op, branch, "lambda_2"))

    def _scale(self, op: Op, x: ir.Value, name: str) -> ir.Value:
        scale = op.parameter(self.weights.take(name, (self.size,), op.dtype))
        return op.Mul(x, op.cast(scale, op.dtype))


class Model:
    """Class token and patches, blocks, pixel shuffle and projector."""

    parts = ("vision_tower", "multi_modal_projector")

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config = config
        tower, projector = weights / "vision_tower", weights / "multi_modal_projector"
        self.embeddings = tower / "embeddings"
        self.projection = TilePatches(
            self.embeddings / "patch_embeddings.projection", config.patch_size, config.size
        )
        self.layers = [
            Layer(config, tower / f"encoder.layer.{index}") for index in range(config.depth)
        ]
        self.layernorm = (
            LayerNorm(tower / "layernorm", config.size, config.epsilon)
            if config.final_norm
            else None
        )
        joined = config.size * config.shuffle**2
        self.layer_norm = LayerNorm(projector / "layer_norm", joined, _PROJECTOR_EPSILON)
        self.projector = FeedForward(
            first=projector / "linear_1",
            second=projector / "linear_2",
            sizes=(joined, config.out_size, config.out_size),
            activation=config.projector_activation,
        )

    def forward(self, op: Op, inputs: Mapping[str, ir.Value]) -> list[ir.Value]:
        """Inputs by contract name -> tokens [N * tokens_per_tile, H]."""
        config = self.config
        x = self._embed(op, inputs[graph_io.PIXEL_VALUES])
        for index, layer in enumerate(self.layers):
            with op.scope(f"layer.{index}"):
                x = layer.forward(op, x)
        if self.layernorm is not None:
            x = self.layernorm(op, x)
        one, end = op.constant([1]), op.constant([1 + config.side**2])
        x = op.Slice(x, one, end, one)
        x = pixel_shuffle(op, x, config.side, config.shuffle, config.size)
        y = self.projector(op, self.layer_norm(op, x))
        return [op.Reshape(y, op.constant([-1, config.out_size]))]

    def _embed(self, op: Op, tiles: ir.Value) -> ir.Value:
        """Tiles [N, 3, E, E] -> [N, 1 + side * side, d]."""
        patches = self.projection(op, tiles)
        with op.scope("embeddings"):
            size = self.config.size
            token = self._parameter(op, "cls_token", (1, 1, size))
            num_tiles = op.Shape(tiles, start=0, end=1)
            tokens = op.Expand(token, op.Concat(num_tiles, op.constant([1, size]), axis=0))
            x = op.Concat(tokens, patches, axis=1)
            if not self.config.positions:
                return x
            shape = 1, 1 + self.config.side**2, size
            return op.Add(x, self._parameter(op, "position_embeddings", shape))

    def _parameter(self, op: Op, name: str, shape: tuple[int, ...]) -> ir.Value:
        return op.cast(op.parameter(self.embeddings.take(name, shape, op.dtype)), op.dtype)
