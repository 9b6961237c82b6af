"""Qwen2-VL's encoder (arXiv 2409.12191): images of any size, full attention among patches.

Shapes: P patches, d width, M merge size, H hidden size of the language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.core.model_spec import VisionSpec
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.visual import (
    check_heads,
    expect_language_size,
    read_activation,
    read_square,
    read_theta,
)
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.mlp import FeedForward
from edgellm.export.layers.norm import LayerNorm
from edgellm.export.layers.patches import PatchEmbedding, PatchState, Windows, rotary_tables
from edgellm.export.onnx.builder import Op

TINY = {
    "model_type": "qwen2_vl",
    "vision_config": {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 48,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "text_config": {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    },
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
EPSILON = 1e-6  # no config has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The encoder's facts."""

    depth: int
    size: int  # d
    inner_size: int
    num_heads: int
    head_dim: int
    activation: str
    out_size: int  # H
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    theta: float
    window_size: int = 0  # side in patches
    full_attention: tuple[int, ...] = ()  # blocks without windows
    position_grid: int = 0
    deepstack: tuple[int, ...] = ()  # blocks whose outputs are DeepStack levels

    @classmethod
    def from_hf(cls, vision: ConfigReader, model: ConfigReader) -> Config:
        """Read `vision_config`, and the encoder's keys in the rest of config.json."""
        size = vision.positive("embed_dim", 1280)
        out_size = vision.positive("hidden_size", 3584)
        expect_language_size(model, out_size)
        return cls(
            size=size,
            out_size=out_size,
            inner_size=size * vision.positive("mlp_ratio", 4),
            activation=read_activation(vision, "hidden_act", "quick_gelu"),
            **cls.shared(vision, size),
        )

    @staticmethod
    def shared(vision: ConfigReader, size: int) -> dict[str, Any]:
        """Facts that the configs of all Qwen encoders share, by field."""
        vision.expect("in_channels", 3)
        vision.expect("in_chans", 3)
        patch_size = read_square(vision, "patch_size", 14)
        vision.expect("spatial_patch_size", patch_size)
        num_heads = vision.positive("num_heads", 16)
        return {
            "depth": vision.positive("depth", 32),
            "num_heads": num_heads,
            "head_dim": check_heads(size, num_heads, multiple=4),
            "patch_size": patch_size,
            "temporal_patch_size": read_square(vision, "temporal_patch_size", 2),
            "merge_size": vision.positive("spatial_merge_size", 2),
            "theta": read_theta(vision),
        }

    def spec(self, model_type: str, num_parameters: int) -> VisionSpec:
        """The spec for the manifest."""
        return VisionSpec(
            model_type=model_type,
            hidden_size=self.out_size,
            patch_size=self.patch_size,
            merge_size=self.merge_size,
            temporal_patch_size=self.temporal_patch_size,
            window_size=self.window_size,
            position_grid=self.position_grid,
            num_deepstack=len(self.deepstack),
            image_size=0,
            tokens_per_tile=0,
            num_parameters=num_parameters,
        )


class Attention:
    """Self-attention with one layer for q, k and v."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.size = config.size
        self.qkv = Linear(weights / "qkv", config.size, 3 * config.size, bias=True)
        self.proj = Linear(weights / "proj", config.size, config.size, bias=True)

    def forward(self, op: Op, x: ir.Value, state: PatchState, *, windowed: bool) -> ir.Value:
        """X [1, P, d] -> [1, P, d]."""
        sizes = op.constant([self.size] * 3)
        q, k, v = op.outputs(3, "Split", self.qkv(op, x), sizes, axis=-1)
        return self.proj(op, state.attend(q, k, v, windowed=windowed))


class Block:
    """Pre-norm transformer block."""

    norm: Any = LayerNorm

    def __init__(self, config: Config, weights: Weights) -> None:
        self.norm1 = self.norm(weights / "norm1", config.size, EPSILON)
        self.norm2 = self.norm(weights / "norm2", config.size, EPSILON)
        self.attn = Attention(config, weights / "attn")
        self.mlp = self.network(config, weights / "mlp")

    def network(self, config: Config, weights: Weights) -> Any:
        """The feed-forward network."""
        sizes = config.size, config.inner_size, config.size
        return FeedForward(
            first=weights / "fc1", second=weights / "fc2", sizes=sizes, activation=config.activation
        )

    def forward(self, op: Op, x: ir.Value, state: PatchState, *, windowed: bool) -> ir.Value:
        """X [1, P, d] -> [1, P, d]."""
        x = op.Add(x, self.attn.forward(op, self.norm1(op, x), state, windowed=windowed))
        return op.Add(x, self.mlp(op, self.norm2(op, x)))


class Merger:
    """Blocks of M * M patches to tokens."""

    norm: Any = LayerNorm

    def __init__(self, config: Config, weights: Weights) -> None:
        self.size = config.size * config.merge_size**2
        self.ln_q = self.norm(weights / "ln_q", config.size, EPSILON)
        sizes = self.size, self.size, config.out_size
        self.mlp = FeedForward(
            first=weights / "mlp.0", second=weights / "mlp.2", sizes=sizes, activation="gelu"
        )

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the network; x [1, P, d] -> [P / M^2, H]."""
        return self.mlp(op, op.Reshape(self.ln_q(op, x), op.constant([-1, self.size])))


class Model:
    """Patch embedding, blocks and merger."""

    parts = ("visual",)
    block: type[Block] = Block
    merger_type: type[Any] = Merger
    patch_bias = False

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config = config
        visual = weights / "visual"
        kernel = 3, config.temporal_patch_size, config.patch_size, config.patch_size
        self.patch_embed = PatchEmbedding(
            weights=visual / "patch_embed.proj",
            kernel=kernel,
            size=config.size,
            bias=self.patch_bias,
        )
        self.blocks = [
            self.block(config, visual / f"blocks.{index}") for index in range(config.depth)
        ]
        self.merger = self.merger_type(config, visual / "merger")

    def forward(self, op: Op, inputs: Mapping[str, ir.Value]) -> list[ir.Value]:
        """Inputs by contract name -> tokens [P / M^2, H], then the deepstack levels if any."""
        x = self.embed(op, inputs)
        state = self.begin(op, inputs)
        levels = []
        for index, block in enumerate(self.blocks):
            with op.scope(f"blocks.{index}"):
                x = block.forward(op, x, state, windowed=index not in self.config.full_attention)
            levels += self.tap(op, x, index)
        return [self.merger(op, x), *levels]

    def embed(self, op: Op, inputs: Mapping[str, ir.Value]) -> ir.Value:
        """The input [1, P, d] of the first block."""
        return self.patch_embed(op, inputs[graph_io.PIXEL_VALUES])

    def begin(self, op: Op, inputs: Mapping[str, ir.Value]) -> PatchState:
        """Append nodes that all blocks share."""
        config = self.config
        cos, sin = rotary_tables(
            op, inputs[graph_io.PATCH_POSITIONS], config.head_dim, config.theta
        )
        windows = None
        if config.window_size:
            windows = Windows.prepare(
                op,
                inputs[graph_io.WINDOW_SLOTS],
                inputs[graph_io.WINDOW_MASK],
                inputs[graph_io.WINDOW_ROWS],
                config.window_size**2,
            )
        return PatchState(
            op=op, num_heads=config.num_heads, size=config.size, cos=cos, sin=sin, windows=windows
        )

    def tap(self, op: Op, x: ir.Value, index: int) -> list[ir.Value]:
        """Hook for encoders with DeepStack levels."""
        del op, x, index
        return []
