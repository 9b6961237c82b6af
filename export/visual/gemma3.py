"""Gemma 3's encoder (arXiv 2503.19786): SigLIP (2303.15343), average pooling, norm, projection.

Shapes: N images or crops of E pixels a side, side = E / patch size, d width, H hidden size of the
language model, whose attention is bidirectional among the tokens of an image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.reader import REMEDY, ConfigReader
from edgellm.export.config.visual import check_heads, language_size, read_activation, read_square
from edgellm.export.layers.norm import ShiftedRMSNorm
from edgellm.export.layers.patches import average_blocks
from edgellm.export.layers.tiles import pixel_shuffle
from edgellm.export.onnx.builder import Op
from edgellm.export.visual import idefics3

TINY = {
    "model_type": "gemma3",
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 4,
        "vision_use_head": False,
    },
    "text_config": {
        "model_type": "gemma3_text",
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "max_position_embeddings": 2048,
        "sliding_window": 10,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "pad_token_id": 0,
    },
    "mm_tokens_per_image": 16,
    "image_token_index": 90,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(idefics3.Config):
    """The encoder's facts; a token is the average of `shuffle` by `shuffle` patches."""

    @classmethod
    def from_hf(cls, vision: ConfigReader, model: ConfigReader) -> Config:
        """Read `vision_config`, and the encoder's keys in the rest of config.json."""
        vision.optional("vision_use_head", bool)  # pools for SigLIP's own loss
        vision.expect("num_channels", 3)
        size = vision.positive("hidden_size", 768)
        num_heads = vision.positive("num_attention_heads", 12)
        check_heads(size, num_heads)
        image_size = read_square(vision, "image_size", 224)
        patch_size = read_square(vision, "patch_size", 16)
        tokens = model.positive("mm_tokens_per_image", 256)
        tokens_side, side = math.isqrt(tokens), image_size // patch_size
        if tokens_side**2 != tokens or not side or side % tokens_side:
            raise UnsupportedModelError(
                f"config.json: mm_tokens_per_image = {tokens} is not a square that divides "
                f"{side} by {side} patches",
                hint=REMEDY,
            )
        return cls(
            depth=vision.positive("num_hidden_layers", 12),
            size=size,
            inner_size=vision.positive("intermediate_size", 3072),
            num_heads=num_heads,
            activation=read_activation(vision, "hidden_act", "gelu_pytorch_tanh"),
            epsilon=vision.read("layer_norm_eps", float, 1e-6),
            out_size=language_size(model),
            image_size=image_size,
            patch_size=patch_size,
            shuffle=side // tokens_side,
        )


class Projector:
    """Average pooling, norm and projection."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config, self.weights = config, weights
        self.mm_soft_emb_norm = ShiftedRMSNorm(
            weights / "mm_soft_emb_norm", config.size, config.epsilon
        )

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """X [N, side * side, d] -> [N * tokens, H]."""
        config = self.config
        with op.scope("multi_modal_projector"):
            blocks = pixel_shuffle(op, x, config.side, config.shuffle, config.size)
            rows = average_blocks(op, blocks, config.shuffle**2, config.size)
        normed = self.mm_soft_emb_norm(op, rows)
        with op.scope("multi_modal_projector"):
            shape = config.size, config.out_size
            weight = self.weights.take("mm_input_projection_weight", shape, op.dtype)
            return op.MatMul(normed, op.cast(op.parameter(weight), op.dtype))


class Model:
    """SigLIP's patches, blocks and norm; the projector."""

    parts = ("vision_tower", "multi_modal_projector")

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config = config
        tower = weights / "vision_tower"
        older = tower / "vision_model"  # its name in files of older versions
        if older.info("post_layernorm.weight") is not None:
            tower = older
        self.encoder = idefics3.Encoder(config, tower)
        self.projector = Projector(config, weights / "multi_modal_projector")

    def forward(self, op: Op, inputs: Mapping[str, ir.Value]) -> list[ir.Value]:
        """Inputs by contract name -> tokens [N * tokens_per_tile, H]."""
        return [self.projector(op, self.encoder(op, inputs[graph_io.PIXEL_VALUES]))]
