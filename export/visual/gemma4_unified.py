"""Gemma 4 12B's embedder of images, which has no layers of attention: each token is one patch.

Layer norms around a linear layer, learned embeddings of columns and rows, a norm and a projection.
Shapes: P patches, d width, H hidden size of the language model. Source: transformers'
models/gemma4_unified.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.core.model_spec import VisionSpec
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.visual import language_size, read_square
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.norm import LayerNorm, UnweightedRMSNorm
from edgellm.export.layers.patches import channels_last
from edgellm.export.onnx.builder import Op
from edgellm.export.visual import gemma4

TINY = {
    **gemma4.TINY,
    "model_type": "gemma4_unified",
    "vision_config": {
        "model_type": "gemma4_unified_vision",
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "mm_embed_dim": 40,
        "mm_posemb_size": 280,
        "output_proj_dims": 40,
    },
    "text_config": {
        **gemma4.TINY["text_config"],
        "model_type": "gemma4_unified_text",
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
    },
    "audio_token_id": 92,
}
for _key in ("hidden_size_per_layer_input", "vocab_size_per_layer_input"):
    del TINY["text_config"][_key]
_EPSILON = 1e-5  # of layer norms; no config has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The embedder's facts."""

    size: int  # d
    out_size: int  # H
    patch_size: int  # of a token
    num_positions: int  # of each axis
    epsilon: float

    @classmethod
    def from_hf(cls, vision: ConfigReader, model: ConfigReader) -> Config:
        """Read `vision_config`, and the embedder's keys in the rest of config.json."""
        size = vision.positive("mm_embed_dim", 3840)
        vision.expect("output_proj_dims", size)
        small = read_square(vision, "patch_size", 16)
        side = small * vision.positive("pooling_kernel_size", 3)
        vision.expect("model_patch_size", side)
        return cls(
            size=size,
            out_size=language_size(model),
            patch_size=side,
            num_positions=vision.positive("mm_posemb_size", 1120),
            epsilon=vision.read("rms_norm_eps", float, 1e-6),
        )

    def spec(self, model_type: str, num_parameters: int) -> VisionSpec:
        """The spec for the manifest."""
        return VisionSpec(
            model_type=model_type,
            hidden_size=self.out_size,
            patch_size=self.patch_size,
            merge_size=1,
            temporal_patch_size=1,
            window_size=0,
            position_grid=0,
            num_deepstack=0,
            image_size=0,
            tokens_per_tile=0,
            num_parameters=num_parameters,
        )


class Model:
    """Patch embedding, embeddings of places, norm and projection."""

    parts = ("vision_embedder", "embed_vision")

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config, self.weights = config, weights / "vision_embedder"
        values, size = 3 * config.patch_size**2, config.size
        self.patch_ln1 = LayerNorm(self.weights / "patch_ln1", values, _EPSILON)
        self.patch_dense = Linear(self.weights / "patch_dense", values, size, bias=True)
        self.patch_ln2 = LayerNorm(self.weights / "patch_ln2", size, _EPSILON)
        self.pos_norm = LayerNorm(self.weights / "pos_norm", size, _EPSILON)
        self.norm = UnweightedRMSNorm(size, config.epsilon)
        self.embedding_projection = Linear(
            weights / "embed_vision.embedding_projection", size, config.out_size, bias=False
        )

    def forward(self, op: Op, inputs: Mapping[str, ir.Value]) -> list[ir.Value]:
        """Inputs by contract name -> tokens [P, H]."""
        with op.scope("patches"):
            pixels = channels_last(op, inputs[graph_io.PIXEL_VALUES], self.config.patch_size)
        x = self.patch_ln2(op, self.patch_dense(op, self.patch_ln1(op, pixels)))
        x = self.pos_norm(op, op.Add(x, self._places(op, inputs[graph_io.PATCH_POSITIONS])))
        tokens = self.embedding_projection(op, self.norm(op, x))
        return [op.Reshape(tokens, op.constant([-1, self.config.out_size]))]

    def _places(self, op: Op, rows_and_columns: ir.Value) -> ir.Value:
        """Int64 [P, 2] -> the sum of the embeddings of column and row [1, P, d]."""
        count, size = self.config.num_positions, self.config.size
        with op.scope("pos_embedding"):
            stored = self.weights.take("pos_embedding", (count, 2, size), op.dtype)
            table = op.parameter(dataclasses.replace(stored, shape=(2 * count, size)))
            # A position's embedding as a column is followed by that as a row
            indices = op.Add(
                op.Mul(rows_and_columns, op.constant(2)), op.constant(np.array([1, 0]))
            )
            both = op.Gather(table, indices, axis=0)  # [P, 2, d]
            if table.dtype != op.dtype:
                both = op.Cast(both, to=int(op.dtype))
            return op.Unsqueeze(op.ReduceSum(both, op.constant([1]), keepdims=0), op.constant([0]))
