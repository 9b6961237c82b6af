"""Gemma 4's encoder: patches of any grid, 2-D RoPE, sandwich norms, average pooling, projection.

Patches of one soft token are consecutive in the stream, so that pooling is a reshape. Shapes: P
patches, d width, h heads of D numbers, M patches along a side of a token, H hidden size of the
language model. Source: transformers' models/gemma4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.reader import REMEDY, ConfigReader
from edgellm.export.config.visual import language_size, read_activation, read_square, read_theta
from edgellm.export.layers.activations import activate
from edgellm.export.layers.attention import merge_heads, split_heads
from edgellm.export.layers.linear import ClippedLinear, Linear
from edgellm.export.layers.norm import RMSNorm, UnweightedRMSNorm
from edgellm.export.layers.patches import (
    PatchState,
    average_blocks,
    channels_last,
    rotary_tables,
)
from edgellm.export.onnx.builder import Op
from edgellm.export.visual import qwen2_vl

TINY = {
    "model_type": "gemma4",
    "vision_config": {
        "model_type": "gemma4_vision",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 256,
        "use_clipped_linears": True,
    },
    "text_config": {
        "model_type": "gemma4_text",
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "global_head_dim": 24,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 96,
        "max_position_embeddings": 2048,
        "sliding_window": 10,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "pad_token_id": 0,
    },
    "image_token_id": 90,
    "video_token_id": 91,
}
# Of other tools, or of parts that transformers does not compute
_UNUSED = ("default_output_length", "global_head_dim", "max_position_embeddings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(qwen2_vl.Config):
    """The encoder's facts; `merge_size` is that of pooling."""

    epsilon: float
    num_positions: int  # of each axis in the table
    is_clipped: bool  # linear layers have bounds of inputs and outputs
    is_standardized: bool  # tokens are shifted and scaled after pooling

    @classmethod
    def from_hf(cls, vision: ConfigReader, model: ConfigReader) -> Config:
        """Read `vision_config`, and the encoder's keys in the rest of config.json."""
        vision.skip(*_UNUSED)
        vision.expect("attention_bias", False)
        num_heads = vision.positive("num_attention_heads", 12)
        if (kv_heads := vision.positive("num_key_value_heads", 12)) != num_heads:
            raise UnsupportedModelError(
                f"config.json: num_key_value_heads = {kv_heads} of the encoder should be "
                f"{num_heads}, as num_attention_heads",
                hint=REMEDY,
            )
        head_dim = vision.positive("head_dim", 64)
        if head_dim % 4:
            raise UnsupportedModelError(
                f"config.json: head_dim = {head_dim} of the encoder is no multiple of 4",
                hint=REMEDY,
            )
        return cls(
            depth=vision.positive("num_hidden_layers", 16),
            size=vision.positive("hidden_size", 768),
            inner_size=vision.positive("intermediate_size", 3072),
            num_heads=num_heads,
            head_dim=head_dim,
            activation=read_activation(vision, "hidden_activation", "gelu_pytorch_tanh"),
            out_size=language_size(model),
            patch_size=read_square(vision, "patch_size", 16),
            temporal_patch_size=1,
            merge_size=vision.positive("pooling_kernel_size", 3),
            theta=read_theta(vision, 100.0),
            epsilon=vision.read("rms_norm_eps", float, 1e-6),
            num_positions=vision.positive("position_embedding_size", 10240),
            is_clipped=vision.read("use_clipped_linears", bool, False),
            is_standardized=vision.read("standardize", bool, False),
        )


class Embeddings:
    """Patches as a linear layer, and learned embeddings of columns and rows."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config, self.weights = config, weights
        values = 3 * config.patch_size**2
        self.input_proj = Linear(weights / "input_proj", values, config.size, bias=False)

    def __call__(self, op: Op, patches: ir.Value, places: ir.Value) -> ir.Value:
        """Append the layers; patches [P, 3*p*p], columns and rows [P, 2] -> [1, P, d]."""
        config = self.config
        with op.scope("patch_embedder"):
            pixels = channels_last(op, patches, config.patch_size)
            one, two = (op.constant(number, op.dtype) for number in (1, 2))
            pixels = op.Sub(op.Mul(pixels, two), one)  # from -1 to 1
        x = self.input_proj(op, pixels)
        with op.scope("position_embedding_table"):
            count, size = config.num_positions, config.size
            stored = self.weights.take("position_embedding_table", (2, count, size), op.dtype)
            table = op.parameter(dataclasses.replace(stored, shape=(2 * count, size)))
            indices = op.Add(places, op.constant(np.array([0, count])))
            both = op.Gather(table, indices, axis=0)  # [P, 2, d]
            if table.dtype != op.dtype:  # after the look-up, as in `Embedding`
                both = op.Cast(both, to=int(op.dtype))
            added = op.ReduceSum(both, op.constant([1]), keepdims=0)
            return op.Add(x, op.Unsqueeze(added, op.constant([0])))


class Attention:
    """Self-attention with norms of queries, keys and values; scores have no factor."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config = config
        size, width = config.size, config.num_heads * config.head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            ClippedLinear(weights / f"{name}_proj", (size, width), is_clipped=config.is_clipped)
            for name in "qkv"
        )
        self.o_proj = ClippedLinear(weights / "o_proj", (width, size), is_clipped=config.is_clipped)
        self.q_norm, self.k_norm = (
            RMSNorm(weights / f"{name}_norm", config.head_dim, config.epsilon) for name in "qk"
        )
        self.v_norm = UnweightedRMSNorm(config.head_dim, config.epsilon)

    def forward(self, op: Op, x: ir.Value, state: PatchState) -> ir.Value:
        """X [1, P, d] -> [1, P, d]."""
        size = self.config.head_dim
        q = self._by_halves(op, self.q_norm(op, split_heads(op, self.q_proj(op, x), size)))
        k = self._by_halves(op, self.k_norm(op, split_heads(op, self.k_proj(op, x), size)))
        v = merge_heads(op, self.v_norm(op, split_heads(op, self.v_proj(op, x), size)))
        return self.o_proj(op, state.attend(q, k, v, windowed=False))

    def _by_halves(self, op: Op, x: ir.Value) -> ir.Value:
        """X [1, P, h, D] -> [1, P, h * D], in the order of `rotary_tables`.

        A head has both halves of its pairs for columns, then both for rows; RoPE takes the first
        halves of all, then the second. Scores do not depend on the order.
        """
        heads, size = self.config.num_heads, self.config.head_dim
        apart = op.Reshape(x, op.constant([0, -1, heads, 2, 2, size // 4]))
        halves = op.Transpose(apart, perm=[0, 1, 2, 4, 3, 5])
        return op.Reshape(halves, op.constant([0, 0, heads * size]))


class MLP:
    """Gated feed-forward network of clipped layers."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.activation = config.activation
        size, inner_size = config.size, config.inner_size
        self.gate_proj, self.up_proj = (
            ClippedLinear(
                weights / f"{name}_proj", (size, inner_size), is_clipped=config.is_clipped
            )
            for name in ("gate", "up")
        )
        self.down_proj = ClippedLinear(
            weights / "down_proj", (inner_size, size), is_clipped=config.is_clipped
        )

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the network; x [1, P, d] -> [1, P, d]."""
        gate = activate(op, self.gate_proj(op, x), self.activation)
        return self.down_proj(op, op.Mul(gate, self.up_proj(op, x)))


class Layer:
    """Transformer block whose branches are normalized before and after."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.self_attn = Attention(config, weights / "self_attn")
        self.mlp = MLP(config, weights / "mlp")
        (
            self.input_layernorm,
            self.post_attention_layernorm,
            self.pre_feedforward_layernorm,
            self.post_feedforward_layernorm,
        ) = (
            RMSNorm(weights / f"{name}_layernorm", config.size, config.epsilon)
            for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        )

    def forward(self, op: Op, x: ir.Value, state: PatchState) -> ir.Value:
        """X [1, P, d] -> [1, P, d]."""
        attended = self.self_attn.forward(op, self.input_layernorm(op, x), state)
        x = op.Add(x, self.post_attention_layernorm(op, attended))
        y = self.mlp(op, self.pre_feedforward_layernorm(op, x))
        return op.Add(x, self.post_feedforward_layernorm(op, y))


class Projector:
    """Pooling, standardization, norm and projection."""

    def __init__(self, config: Config, tower: Weights, embedder: Weights) -> None:
        self.config, self.tower = config, tower
        # Tokens are multiplied by sqrt(d), which the norm removes again, unless shifted before
        epsilon = config.epsilon if config.is_standardized else config.epsilon / config.size
        self.norm = UnweightedRMSNorm(config.size, epsilon)
        self.embedding_projection = Linear(
            embedder / "embedding_projection", config.size, config.out_size, bias=False
        )

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the layers; x [1, P, d] -> [P / M^2, H]."""
        config = self.config
        with op.scope("pooler"):
            if config.is_standardized:
                tokens = self._standardized(op, x)
            else:
                tokens = average_blocks(op, x, config.merge_size**2, config.size)
        return self.embedding_projection(op, self.norm(op, tokens))

    def _standardized(self, op: Op, x: ir.Value) -> ir.Value:
        """Averages times sqrt(d), shifted and scaled, in float32: they exceed float16."""
        config, wide = self.config, ir.DataType.FLOAT
        if op.dtype != wide:
            x = op.Cast(x, to=int(wide))
        tokens = average_blocks(op, x, config.merge_size**2, config.size, wide)
        bias, scale = (
            op.cast(op.parameter(self.tower.take(f"std_{name}", (config.size,), wide)), wide)
            for name in ("bias", "scale")
        )
        tokens = op.Mul(tokens, op.constant(config.size**0.5, wide))
        tokens = op.Mul(op.Sub(tokens, bias), scale)
        return tokens if op.dtype == wide else op.Cast(tokens, to=int(op.dtype))


class Model:
    """Patch embedding, blocks, pooling and projection."""

    parts = ("vision_tower", "embed_vision")

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config = config
        tower = weights / "vision_tower"
        self.patch_embedder = Embeddings(config, tower / "patch_embedder")
        self.layers = [
            Layer(config, tower / f"encoder.layers.{index}") for index in range(config.depth)
        ]
        self.projector = Projector(config, tower, weights / "embed_vision")

    def forward(self, op: Op, inputs: Mapping[str, ir.Value]) -> list[ir.Value]:
        """Inputs by contract name -> tokens [P / M^2, H]."""
        config = self.config
        with op.scope("places"):  # columns, then rows
            swapped = op.constant(np.array([1, 0]))
            places = op.Gather(inputs[graph_io.PATCH_POSITIONS], swapped, axis=1)
        x = self.patch_embedder(op, inputs[graph_io.PIXEL_VALUES], places)
        cos, sin = rotary_tables(op, places, config.head_dim, config.theta)
        state = PatchState(
            op=op,
            num_heads=config.num_heads,
            size=config.num_heads * config.head_dim,
            cos=cos,
            sin=sin,
            windows=None,
            scale=1.0,
        )
        for index, layer in enumerate(self.layers):
            with op.scope(f"layers.{index}"):
                x = layer.forward(op, x, state)
        return [self.projector(op, x)]
