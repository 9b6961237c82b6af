"""LFM3-VL's encoder: gated convolutions over the grid of patches, attention, and a projector.

Shapes: P patches, d width, D size of a head, K side of the convolutions, M merge size, H hidden
size of the language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.reader import REMEDY, ConfigReader
from edgellm.export.config.visual import (
    check_heads,
    language_size,
    read_activation,
    read_square,
    read_theta,
)
from edgellm.export.layers.attention import merge_heads, split_heads
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.mlp import FeedForward, GatedMLP
from edgellm.export.layers.norm import LayerNorm, RMSNorm
from edgellm.export.layers.patches import PatchState, rotary_tables
from edgellm.export.onnx.builder import Op
from edgellm.export.visual import qwen2_vl

TINY = {
    "model_type": "lfm3_vl",
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "layer_types": ["conv", "full_attention"],
        "patch_size": 4,
    },
    "text_config": {
        "model_type": "lfm3",
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "layer_types": ["conv", "full_attention", "conv"],
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
    },
    "projector_hidden_size": 56,
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
_CONV, _FULL = "conv", "full_attention"
_PROJECTOR_EPSILON = 1e-6  # no config has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(qwen2_vl.Config):
    """The encoder's facts."""

    num_kv_heads: int
    convolutions: tuple[bool, ...]  # by layer; the others attend
    kernel: int  # K
    epsilon: float
    projector_size: int
    projector_activation: str
    projector_bias: bool

    @classmethod
    def from_hf(cls, vision: ConfigReader, model: ConfigReader) -> qwen2_vl.Config:
        """Read `vision_config`, and the encoder's keys in the rest of config.json."""
        vision.expect("in_channels", 3)
        size, heads = (
            vision.positive("hidden_size", 1024),
            vision.positive("num_attention_heads", 16),
        )
        depth = vision.positive("num_hidden_layers", 14)
        kernel = vision.positive("conv_kernel_size", 3)
        if kernel % 2 == 0:
            raise UnsupportedModelError(
                f"config.json: conv_kernel_size = {kernel} is even, so grids would grow",
                hint=REMEDY,
            )
        return cls(
            depth=depth,
            size=size,
            inner_size=vision.positive("intermediate_size", 2560),
            num_heads=heads,
            num_kv_heads=_read_kv_heads(vision, heads),
            head_dim=check_heads(size, heads, multiple=4),
            activation="silu",
            out_size=language_size(model),
            patch_size=read_square(vision, "patch_size", 16),
            temporal_patch_size=read_square(vision, "temporal_patch_size", 2),
            merge_size=vision.positive("spatial_merge_size", 2),
            theta=read_theta(vision, 1e6),
            convolutions=_read_layers(vision, depth),
            kernel=kernel,
            epsilon=vision.read("norm_eps", float, 1e-5),
            projector_size=model.positive("projector_hidden_size", 4096),
            projector_activation=read_activation(model, "projector_hidden_act", "gelu"),
            projector_bias=model.read("projector_bias", bool, True),
        )


def _read_kv_heads(vision: ConfigReader, heads: int) -> int:
    found = vision.positive("num_key_value_heads", 8)
    if heads % found:
        raise UnsupportedModelError(
            f"config.json: {heads} attention heads cannot share {found} key/value heads",
            hint=REMEDY,
        )
    return found


def _read_layers(vision: ConfigReader, depth: int) -> tuple[bool, ...]:
    """Whether each layer is a convolution."""
    usual = [_CONV if index < 2 or index % 2 else _FULL for index in range(depth)]
    found = vision.read("layer_types", list, usual)
    if len(found) != depth or not {*found} <= {_CONV, _FULL}:
        raise UnsupportedModelError(
            f"config.json: layer_types = {found} should have {_CONV!r} or {_FULL!r} for each of "
            f"{depth} layers",
            hint=REMEDY,
        )
    return tuple(kind == _CONV for kind in found)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The patch at one offset from each patch."""

    index: ir.Value  # int64 [P]
    inside: ir.Value  # [P, 1]; 0: beyond the grid


class Convolution:
    """Gated depthwise convolution over the grid of patches."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.size, self.kernel = config.size, config.kernel
        self.in_proj = Linear(weights / "in_proj", self.size, 3 * self.size, bias=False)
        self.spatial_conv = weights / "spatial_conv"
        self.out_proj = Linear(weights / "out_proj", self.size, self.size, bias=False)

    def forward(self, op: Op, x: ir.Value, near: list[Neighbour]) -> ir.Value:
        """X [1, P, d] -> [1, P, d]; `near` has the offsets row by row."""
        sizes = op.constant([self.size] * 3)
        entering, leaving, x = op.outputs(3, "Split", self.in_proj(op, x), sizes, axis=-1)
        gated = op.Mul(entering, x)
        shape = self.size, 1, self.kernel, self.kernel
        stored = op.cast(op.parameter(self.spatial_conv.take("weight", shape, op.dtype)), op.dtype)
        flat = op.Reshape(stored, op.constant([self.size, self.kernel**2]))
        rows = op.Transpose(flat, perm=[1, 0])
        parts = [
            op.Mul(
                op.Mul(op.Gather(gated, each.index, axis=1), each.inside),
                op.Gather(rows, op.constant(place), axis=0),
            )
            for place, each in enumerate(near)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = op.Add(total, part)
        return self.out_proj(op, op.Mul(leaving, total))


class Attention:
    """Grouped-query self-attention among all patches, with norms of queries and keys."""

    def __init__(self, config: Config, weights: Weights) -> None:
        size, self.head_dim = config.size, config.head_dim
        self.groups = config.num_heads // config.num_kv_heads
        kv_size = config.num_kv_heads * self.head_dim
        self.q_proj = Linear(weights / "q_proj", size, size, bias=False)
        self.k_proj = Linear(weights / "k_proj", size, kv_size, bias=False)
        self.v_proj = Linear(weights / "v_proj", size, kv_size, bias=False)
        self.out_proj = Linear(weights / "out_proj", size, size, bias=False)
        self.q_norm = RMSNorm(weights / "q_norm", self.head_dim, config.epsilon)
        self.k_norm = RMSNorm(weights / "k_norm", self.head_dim, config.epsilon)

    def forward(self, op: Op, x: ir.Value, state: PatchState) -> ir.Value:
        """X [1, P, d] -> [1, P, d]."""
        q = merge_heads(op, self.q_norm(op, split_heads(op, self.q_proj(op, x), self.head_dim)))
        k = self.k_norm(op, split_heads(op, self.k_proj(op, x), self.head_dim))
        k, v = self._repeated(op, k), self._repeated(op, self.v_proj(op, x))
        return self.out_proj(op, state.attend(q, k, v, windowed=False))

    def _repeated(self, op: Op, x: ir.Value) -> ir.Value:
        """The heads of x, each once for every query head: -> [1, P, d]."""
        apart = op.Reshape(x, op.constant([1, -1, 1, self.head_dim]))
        repeated = op.Expand(apart, op.constant([1, 1, self.groups, self.head_dim]))
        return op.Reshape(repeated, op.constant([1, -1, self.q_proj.shape[0]]))


class Layer:
    """A convolution or attention, then a gated network, each after a norm."""

    def __init__(self, config: Config, weights: Weights, index: int) -> None:
        self.operator_norm = RMSNorm(weights / "operator_norm", config.size, config.epsilon)
        self.ffn_norm = RMSNorm(weights / "ffn_norm", config.size, config.epsilon)
        self.conv = self.self_attn = None
        if config.convolutions[index]:
            self.conv = Convolution(config, weights / "conv")
        else:
            self.self_attn = Attention(config, weights / "self_attn")
        self.feed_forward = GatedMLP(
            weights=weights / "feed_forward",
            size=config.size,
            inner_size=config.inner_size,
            bias=False,
            names=("w1", "w3", "w2"),
        )

    def forward(self, op: Op, x: ir.Value, state: PatchState, near: list[Neighbour]) -> ir.Value:
        """X [1, P, d] -> [1, P, d]."""
        normed = self.operator_norm(op, x)
        if self.conv is not None:
            x = op.Add(self.conv.forward(op, normed, near), x)
        elif self.self_attn is not None:
            x = op.Add(self.self_attn.forward(op, normed, state), x)
        return op.Add(x, self.feed_forward(op, self.ffn_norm(op, x)))


class Model:
    """Patch embedding, layers and projector."""

    parts = ("vision_tower", "multi_modal_projector")
    renamed: ClassVar = {
        "patchifier": "patch_embed",
        "q_layernorm": "q_norm",
        "k_layernorm": "k_norm",
    }

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config = config
        tower, projector = weights / "vision_tower", weights / "multi_modal_projector"
        values = 3 * config.temporal_patch_size * config.patch_size**2
        self.patch_embed = Linear(tower / "patch_embed", values, config.size, bias=False)
        self.embedding_norm = RMSNorm(tower / "embedding_norm", config.size, config.epsilon)
        self.layers = [
            Layer(config, tower / f"layers.{index}", index) for index in range(config.depth)
        ]
        self.layer_norm = LayerNorm(projector / "layer_norm", config.size, _PROJECTOR_EPSILON)
        self.merged = config.size * config.merge_size**2
        self.projector = FeedForward(
            first=projector / "linear_1",
            second=projector / "linear_2",
            sizes=(self.merged, config.projector_size, config.out_size),
            activation=config.projector_activation,
            bias=config.projector_bias,
        )

    def forward(self, op: Op, inputs: Mapping[str, ir.Value]) -> list[ir.Value]:
        """Inputs by contract name -> tokens [P / M^2, H]."""
        config, positions = self.config, inputs[graph_io.PATCH_POSITIONS]
        patches = op.Unsqueeze(inputs[graph_io.PIXEL_VALUES], op.constant([0]))
        x = self.embedding_norm(op, self.patch_embed(op, patches))
        cos, sin = rotary_tables(op, positions, config.head_dim, config.theta)
        state = PatchState(
            op=op, num_heads=config.num_heads, size=config.size, cos=cos, sin=sin, windows=None
        )
        with op.scope("neighbours"):
            near = neighbours(op, positions, config.kernel, config.merge_size)
        for index, layer in enumerate(self.layers):
            with op.scope(f"layers.{index}"):
                x = layer.forward(op, x, state, near)
        rows = op.Reshape(self.layer_norm(op, x), op.constant([-1, self.merged]))
        return [self.projector(op, rows)]


def neighbours(op: Op, positions: ir.Value, kernel: int, merge_size: int) -> list[Neighbour]:
    """The patches at each offset of a convolution, row by row.

    Args:
        op: the recorder.
        positions: int64 [P, 2] of the patches of one image, in merge-block order.
        kernel: side of the convolution, odd.
        merge_size: side of a block.
    """
    last = op.ReduceMax(positions, op.constant([0]), keepdims=0)
    axes = [
        (op.Gather(positions, op.constant(axis), axis=1), op.Gather(last, op.constant(axis)))
        for axis in (0, 1)
    ]
    merge, zero = op.constant(merge_size), op.constant(0)
    blocks = op.Add(op.Div(axes[1][1], merge), op.constant(1))  # in a row of blocks
    found, reach = [], kernel // 2
    for offset in product(range(-reach, reach + 1), repeat=2):
        wanted = [op.Add(at, op.constant(by)) for (at, _), by in zip(axes, offset, strict=True)]
        inside = [op.Max(op.Min(at, end), zero) for at, (_, end) in zip(wanted, axes, strict=True)]
        (row, column), (block_row, block_column) = inside, (op.Div(at, merge) for at in inside)
        block = op.Add(op.Mul(block_row, blocks), block_column)
        place = op.Add(
            op.Mul(op.Sub(row, op.Mul(block_row, merge)), merge),
            op.Sub(column, op.Mul(block_column, merge)),
        )
        index = op.Add(op.Mul(block, op.constant(merge_size**2)), place)
        # By operators that CUDA has
        shares = [
            op.Cast(op.GreaterOrEqual(upper, lower), to=int(op.dtype))
            for at, (_, end) in zip(wanted, axes, strict=True)
            for upper, lower in ((at, zero), (end, at))
        ]
        is_inside = op.Mul(op.Mul(*shares[:2]), op.Mul(*shares[2:]))
        found.append(Neighbour(index, op.Unsqueeze(is_inside, op.constant([1]))))
    return found
