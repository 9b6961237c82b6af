"""LFM2-VL's encoder (arXiv 2511.23404): SigLIP 2 of any size (2502.14786), unshuffle, projector.

A pass has a tile, or a whole image, whose learned positions are interpolated with antialiasing.
Patches of one token are consecutive in the stream, so that unshuffling is a reshape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.core.errors import UnsupportedModelError
from edgellm.core.model_spec import VisionSpec
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.reader import REMEDY, ConfigReader
from edgellm.export.config.visual import check_heads, language_size, read_activation, read_square
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.mlp import FeedForward
from edgellm.export.layers.norm import LayerNorm
from edgellm.export.layers.patches import channels_last
from edgellm.export.onnx.builder import Op
from edgellm.export.visual import idefics3

TINY = {
    "model_type": "lfm2_vl",
    "vision_config": {
        "model_type": "siglip2_vision_model",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
        "num_patches": 36,
        "vision_use_head": False,
    },
    "text_config": {
        "model_type": "lfm2",
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
    },
    "downsample_factor": 2,
    "projector_hidden_size": 56,
    "image_token_id": 90,
}
_PROJECTOR_EPSILON = 1e-5  # no config has it


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
    patch_size: int
    merge_size: int  # patches along a side of a token
    position_grid: int
    projector_size: int
    projector_activation: str
    projector_bias: bool
    projector_norm: bool

    @classmethod
    def from_hf(cls, vision: ConfigReader, model: ConfigReader) -> Config:
        """Read `vision_config`, and the encoder's keys in the rest of config.json."""
        vision.optional("vision_use_head", bool)  # pools for SigLIP's own loss
        model.expect("vision_feature_layer", -1)
        return cls(
            **cls.siglip2(vision),
            out_size=language_size(model),
            merge_size=model.positive("downsample_factor", 2),
            projector_size=model.positive("projector_hidden_size", 2560),
            projector_activation=read_activation(model, "projector_hidden_act", "gelu"),
            projector_bias=model.read("projector_bias", bool, True),
            projector_norm=model.read("projector_use_layernorm", bool, True),
        )

    @staticmethod
    def siglip2(
        vision: ConfigReader,
        *,
        size: int = 768,
        inner_size: int = 3072,
        depth: int = 12,
        num_heads: int = 12,
    ) -> dict[str, Any]:
        """Read SigLIP 2's facts, by field; the arguments are the family's defaults.

        Raises:
            UnsupportedModelError: heads that do not divide the width, or positions that are no
                square.
        """
        vision.expect("num_channels", 3)
        size = vision.positive("hidden_size", size)
        num_heads = vision.positive("num_attention_heads", num_heads)
        check_heads(size, num_heads)
        positions = vision.positive("num_patches", 256)
        if math.isqrt(positions) ** 2 != positions:
            raise UnsupportedModelError(
                f"config.json: num_patches = {positions} is not a square", hint=REMEDY
            )
        return {
            "depth": vision.positive("num_hidden_layers", depth),
            "size": size,
            "inner_size": vision.positive("intermediate_size", inner_size),
            "num_heads": num_heads,
            "activation": read_activation(vision, "hidden_act", "gelu_pytorch_tanh"),
            "epsilon": vision.read("layer_norm_eps", float, 1e-6),
            "patch_size": read_square(vision, "patch_size", 16),
            "position_grid": math.isqrt(positions),
        }

    def spec(self, model_type: str, num_parameters: int) -> VisionSpec:
        """The spec for the manifest."""
        return VisionSpec(
            model_type=model_type,
            hidden_size=self.out_size,
            patch_size=self.patch_size,
            merge_size=self.merge_size,
            temporal_patch_size=1,
            window_size=0,
            position_grid=self.position_grid,
            antialiases_positions=True,
            num_deepstack=0,
            image_size=0,
            tokens_per_tile=0,
            num_parameters=num_parameters,
        )


class Embeddings:
    """Patches as a linear layer, and interpolated positions."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config = config
        values = 3 * config.patch_size**2
        self.patch_embedding = Linear(weights / "patch_embedding", values, config.size, bias=True)
        self.position_embedding = weights / "position_embedding"

    def __call__(self, op: Op, patches: ir.Value, shares: ir.Value) -> ir.Value:
        """Append the layer; patches [P, 3*p*p], shares [P, G^2] -> [1, P, d]."""
        config = self.config
        with op.scope("embeddings"):
            rows = channels_last(op, patches, config.patch_size)
        x = self.patch_embedding(op, rows)
        with op.scope("position_embedding"):
            shape = config.position_grid**2, config.size
            table = self.position_embedding.take("weight", shape, op.dtype)
            places = op.MatMul(op.cast(shares, op.dtype), op.cast(op.parameter(table), op.dtype))
            return op.Add(x, places)


class Model:
    """Embeddings, SigLIP's blocks and norm, unshuffle and projector."""

    parts = ("vision_tower", "multi_modal_projector")

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config = config
        tower, projector = weights / "vision_tower", weights / "multi_modal_projector"
        older = tower / "vision_model"  # its name in files of older versions
        if older.info("post_layernorm.weight") is not None:
            tower = older
        self.embeddings = Embeddings(config, tower / "embeddings")
        self.layers = [
            idefics3.EncoderLayer(config, tower / f"encoder.layers.{index}")
            for index in range(config.depth)
        ]
        self.post_layernorm = LayerNorm(tower / "post_layernorm", config.size, config.epsilon)
        self.merged = config.size * config.merge_size**2
        self.layer_norm = (
            LayerNorm(projector / "layer_norm", self.merged, _PROJECTOR_EPSILON)
            if config.projector_norm
            else None
        )
        self.projector = FeedForward(
            first=projector / "linear_1",
            second=projector / "linear_2",
            sizes=(self.merged, config.projector_size, config.out_size),
            activation=config.projector_activation,
            bias=config.projector_bias,
        )

    def forward(self, op: Op, inputs: Mapping[str, ir.Value]) -> list[ir.Value]:
        """Inputs by contract name -> tokens [P / M^2, H]."""
        x = self.embeddings(op, inputs[graph_io.PIXEL_VALUES], inputs[graph_io.POS_EMBED_SHARES])
        for index, layer in enumerate(self.layers):
            with op.scope(f"layers.{index}"):
                x = layer.forward(op, x)
        rows = op.Reshape(self.post_layernorm(op, x), op.constant([-1, self.merged]))
        if self.layer_norm is not None:
            rows = self.layer_norm(op, rows)
        return [self.projector(op, rows)]
