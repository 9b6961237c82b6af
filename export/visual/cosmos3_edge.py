"""Cosmos3-Edge's encoder: SigLIP 2 of any size (arXiv 2502.14786), and a patch merger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.visual import language_size
from edgellm.export.layers.mlp import FeedForward
from edgellm.export.layers.norm import LayerNorm
from edgellm.export.onnx.builder import Op
from edgellm.export.visual import idefics3, lfm2_vl

TINY = {
    "model_type": "cosmos3_edge",
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
        "num_patches": 36,
        "spatial_merge_size": 2,
    },
    "text_config": {
        "model_type": "cosmos3_edge_text",
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [4, 2, 2],
        },
    },
    "projector_hidden_size": 56,
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
_MERGER_EPSILON = 1e-6  # no config has it


class Config(lfm2_vl.Config):
    """The encoder's facts."""

    @classmethod
    def from_hf(cls, vision: ConfigReader, model: ConfigReader) -> lfm2_vl.Config:
        """Read `vision_config`, and the encoder's keys in the rest of config.json."""
        facts = cls.siglip2(vision, size=1152, inner_size=4304, depth=27, num_heads=16)
        return cls(
            **facts,
            out_size=language_size(model),
            merge_size=vision.positive("spatial_merge_size", 2),
            projector_size=model.positive("projector_hidden_size", 11520),
            projector_activation="gelu",
            projector_bias=True,
            projector_norm=True,
        )


class Model:
    """Embeddings, SigLIP's blocks and norm, and the merger, whose norm is before the merge."""

    parts = ("visual", "projector")
    renamed: ClassVar = {
        "to_q": "q_proj",
        "to_k": "k_proj",
        "to_v": "v_proj",
        "up_proj": "fc1",
        "down_proj": "fc2",
    }

    def __init__(self, config: lfm2_vl.Config, weights: Weights) -> None:
        tower, projector = weights / "visual", weights / "projector"
        self.embeddings = lfm2_vl.Embeddings(config, tower / "embeddings")
        self.layers = [
            idefics3.EncoderLayer(config, tower / f"encoder.layers.{index}")
            for index in range(config.depth)
        ]
        self.post_layernorm = LayerNorm(tower / "post_layernorm", config.size, config.epsilon)
        self.norm = LayerNorm(projector / "norm", config.size, _MERGER_EPSILON)
        self.merged = config.size * config.merge_size**2
        self.projector = FeedForward(
            first=projector / "linear_fc1",
            second=projector / "linear_fc2",
            sizes=(self.merged, config.projector_size, config.out_size),
            activation=config.projector_activation,
        )

    def forward(self, op: Op, inputs: Mapping[str, ir.Value]) -> list[ir.Value]:
        """Inputs by contract name -> tokens [P / M^2, H]."""
        x = self.embeddings(op, inputs[graph_io.PIXEL_VALUES], inputs[graph_io.POS_EMBED_SHARES])
        for index, layer in enumerate(self.layers):
            with op.scope(f"layers.{index}"):
                x = layer.forward(op, x)
        rows = self.norm(op, self.post_layernorm(op, x))
        return [self.projector(op, op.Reshape(rows, op.constant([-1, self.merged])))]
