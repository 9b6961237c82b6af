"""Qwen3-VL's encoder (arXiv 2511.21631): learned and rotary positions, and DeepStack.

Outputs of inner blocks are also merged, and added after the first layers of the language model
(DeepStack, arXiv 2406.04334).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.visual import expect_language_size, read_activation, read_indices
from edgellm.export.layers.mlp import FeedForward
from edgellm.export.layers.norm import LayerNorm
from edgellm.export.layers.patches import interpolate
from edgellm.export.onnx.builder import Op
from edgellm.export.visual import qwen2_vl

TINY = {
    **qwen2_vl.TINY,
    "model_type": "qwen3_vl",
    "vision_config": {
        "depth": 4,
        "hidden_size": 32,
        "out_hidden_size": 48,
        "intermediate_size": 40,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 2],
    },
    "text_config": {**qwen2_vl.TINY["text_config"], "head_dim": 16},
}


class Config(qwen2_vl.Config):
    """Qwen3-VL's config."""

    @classmethod
    def from_hf(cls, vision: ConfigReader, model: ConfigReader) -> qwen2_vl.Config:
        """Read `vision_config`, and the encoder's keys in the rest of config.json."""
        size = vision.positive("hidden_size", 1152)
        out_size = vision.positive("out_hidden_size", 3584)
        expect_language_size(model, out_size)
        positions = vision.positive("num_position_embeddings", 2304)
        if math.isqrt(positions) ** 2 != positions:
            raise UnsupportedModelError(
                f"config.json: num_position_embeddings = {positions} is not a square"
            )
        shared = cls.shared(vision, size)
        return cls(
            size=size,
            out_size=out_size,
            inner_size=vision.positive("intermediate_size", 4304),
            activation=read_activation(vision, "hidden_act", "gelu_pytorch_tanh"),
            position_grid=math.isqrt(positions),
            deepstack=cls.read_deepstack(vision, shared["depth"]),
            **shared,
        )

    @staticmethod
    def read_deepstack(vision: ConfigReader, depth: int) -> tuple[int, ...]:
        """Read the blocks whose outputs are levels of DeepStack.

        Raises:
            UnsupportedModelError: they are not different blocks.
        """
        deepstack = read_indices(vision, "deepstack_visual_indexes", (8, 16, 24))
        if len(set(deepstack)) != len(deepstack) or max(deepstack, default=0) >= depth:
            raise UnsupportedModelError(
                f"config.json: deepstack_visual_indexes = {list(deepstack)} are not different "
                f"blocks of {depth}"
            )
        return deepstack


class Block(qwen2_vl.Block):
    """Block with other parameter names of the MLP."""

    def network(self, config: qwen2_vl.Config, weights: Weights) -> FeedForward:
        """The feed-forward network."""
        sizes = config.size, config.inner_size, config.size
        first, second = weights / "linear_fc1", weights / "linear_fc2"
        return FeedForward(first=first, second=second, sizes=sizes, activation=config.activation)


class Merger:
    """Blocks of M * M patches to tokens; the norm is before or after the merge."""

    def __init__(
        self, config: qwen2_vl.Config, weights: Weights, *, join_first: bool = False
    ) -> None:
        self.join_first = join_first
        self.size = config.size * config.merge_size**2
        self.norm = LayerNorm(
            weights / "norm", self.size if join_first else config.size, qwen2_vl.EPSILON
        )
        first, second = weights / "linear_fc1", weights / "linear_fc2"
        self.mlp = FeedForward(
            first=first,
            second=second,
            sizes=(self.size, self.size, config.out_size),
            activation="gelu",
        )

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the network; x [1, P, d] -> [P / M^2, H]."""
        joined = op.constant([-1, self.size])
        if self.join_first:
            return self.mlp(op, self.norm(op, op.Reshape(x, joined)))
        return self.mlp(op, op.Reshape(self.norm(op, x), joined))


class Model(qwen2_vl.Model):
    """Patch embedding, learned positions, blocks and mergers."""

    block = Block
    merger_type = Merger
    patch_bias = True

    def __init__(self, config: qwen2_vl.Config, weights: Weights) -> None:
        super().__init__(config, weights)
        visual = weights / "visual"
        self.pos_embed = visual / "pos_embed"
        self.deepstack_merger_list = [
            Merger(config, visual / f"deepstack_merger_list.{level}", join_first=True)
            for level in range(len(config.deepstack))
        ]

    def embed(self, op: Op, inputs: Mapping[str, ir.Value]) -> ir.Value:
        """The input [1, P, d] of the first block."""
        x = super().embed(op, inputs)
        with op.scope("pos_embed"):
            shape = self.config.position_grid**2, self.config.size
            table = op.parameter(self.pos_embed.take("weight", shape, op.dtype))
            index, weight = (
                inputs[name] for name in (graph_io.POS_EMBED_INDEX, graph_io.POS_EMBED_WEIGHT)
            )
            return op.Add(x, interpolate(op, table, index, weight))

    def tap(self, op: Op, x: ir.Value, index: int) -> list[ir.Value]:
        """The DeepStack level of a block, if it has one."""
        deepstack = self.config.deepstack
        if index not in deepstack:
            return []
        return [self.deepstack_merger_list[deepstack.index(index)](op, x)]
