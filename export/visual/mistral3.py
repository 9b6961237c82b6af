"""Mistral 3's encoder: Pixtral (arXiv 2410.07073), patch merger, projector.

Patches of one token are consecutive in the stream, so the merger needs no gather. RoPE has the
even frequencies for rows and the odd ones for columns. Encoders run once for each image, so that
Pixtral's mask between images is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.visual import (
    check_heads,
    language_size,
    read_activation,
    read_square,
    read_theta,
)
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.mlp import FeedForward, GatedMLP
from edgellm.export.layers.norm import RMSNorm
from edgellm.export.layers.patches import PatchEmbedding, PatchState, rotary_tables
from edgellm.export.onnx.builder import Op
from edgellm.export.visual import qwen2_vl

TINY = {
    "model_type": "mistral3",
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 4,
    },
    "text_config": {
        "model_type": "ministral3",
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "image_token_index": 90,
    "spatial_merge_size": 2,
    "tie_word_embeddings": False,
}
_EPSILON = 1e-5  # no config has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(qwen2_vl.Config):
    """The encoder's facts."""

    projector_activation: str
    projector_bias: bool
    projector_epsilon: float

    @classmethod
    def from_hf(cls, vision: ConfigReader, model: ConfigReader) -> Config:
        """Read `vision_config`, and the encoder's keys in the rest of config.json."""
        vision.expect("num_channels", 3)
        model.expect("vision_feature_layer", -1)
        size = vision.positive("hidden_size", 1024)
        num_heads = vision.positive("num_attention_heads", 16)
        head_dim = check_heads(size, num_heads, multiple=4)
        vision.expect("head_dim", head_dim)
        read_square(vision, "image_size", 1024)  # the processor has its own file
        text = model.optional("text_config", dict) or {}
        return cls(
            depth=vision.positive("num_hidden_layers", 24),
            size=size,
            inner_size=vision.positive("intermediate_size", 4096),
            num_heads=num_heads,
            head_dim=head_dim,
            activation=read_activation(vision, "hidden_act", "gelu"),
            out_size=language_size(model),
            patch_size=read_square(vision, "patch_size", 16),
            temporal_patch_size=1,
            merge_size=model.positive("spatial_merge_size", 2),
            theta=read_theta(vision),
            projector_activation=read_activation(model, "projector_hidden_act", "gelu"),
            projector_bias=model.read("multimodal_projector_bias", bool, False),
            projector_epsilon=ConfigReader(text).read("rms_norm_eps", float, 1e-6),
        )


class Attention:
    """Self-attention with a layer each for q, k and v."""

    def __init__(self, config: Config, weights: Weights) -> None:
        size = config.size
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            Linear(weights / f"{name}_proj", size, size, bias=False) for name in "qkvo"
        )

    def forward(self, op: Op, x: ir.Value, state: PatchState) -> ir.Value:
        """X [1, P, d] -> [1, P, d]."""
        q, k, v = self.q_proj(op, x), self.k_proj(op, x), self.v_proj(op, x)
        return self.o_proj(op, state.attend(q, k, v, windowed=False))


class Layer:
    """Pre-norm transformer block."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.attention_norm = RMSNorm(weights / "attention_norm", config.size, _EPSILON)
        self.attention = Attention(config, weights / "attention")
        self.ffn_norm = RMSNorm(weights / "ffn_norm", config.size, _EPSILON)
        self.feed_forward = GatedMLP(
            weights=weights / "feed_forward",
            size=config.size,
            inner_size=config.inner_size,
            bias=False,
            activation=config.activation,
        )

    def forward(self, op: Op, x: ir.Value, state: PatchState) -> ir.Value:
        """X [1, P, d] -> [1, P, d]."""
        x = op.Add(x, self.attention.forward(op, self.attention_norm(op, x), state))
        return op.Add(x, self.feed_forward(op, self.ffn_norm(op, x)))


class Projector:
    """Norm, patch merger, two linear layers."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.size, self.count = config.size, config.merge_size**2
        self.norm = RMSNorm(weights / "norm", config.size, config.projector_epsilon)
        merged = config.size * self.count
        merger = weights / "patch_merger.merging_layer"
        self.merging_layer = Linear(merger, merged, config.size, bias=False)
        self.mlp = FeedForward(
            first=weights / "linear_1",
            second=weights / "linear_2",
            sizes=(config.size, config.out_size, config.out_size),
            activation=config.projector_activation,
            bias=config.projector_bias,
        )

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the network; x [1, P, d] -> [P / M^2, H]."""
        blocks = op.Reshape(self.norm(op, x), op.constant([-1, self.count, self.size]))
        # The merger's weights stand channel by channel, those of a block's patches together
        channels = op.Transpose(blocks, perm=[0, 2, 1])
        rows = op.Reshape(channels, op.constant([-1, self.size * self.count]))
        return self.mlp(op, self.merging_layer(op, rows))


class Model:
    """Patch embedding, norm, blocks and projector."""

    parts = ("vision_tower", "multi_modal_projector")

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config = config
        tower = weights / "vision_tower"
        self.patch_conv = PatchEmbedding(
            weights=tower / "patch_conv",
            kernel=(3, config.patch_size, config.patch_size),
            size=config.size,
            bias=False,
        )
        self.ln_pre = RMSNorm(tower / "ln_pre", config.size, _EPSILON)
        self.layers = [
            Layer(config, tower / f"transformer.layers.{index}") for index in range(config.depth)
        ]
        self.projector = Projector(config, weights / "multi_modal_projector")

    def forward(self, op: Op, inputs: Mapping[str, ir.Value]) -> list[ir.Value]:
        """Inputs by contract name -> tokens [P / M^2, H]."""
        config = self.config
        x = self.ln_pre(op, self.patch_conv(op, inputs[graph_io.PIXEL_VALUES]))
        positions = inputs[graph_io.PATCH_POSITIONS]
        cos, sin = rotary_tables(op, positions, config.head_dim, config.theta, by_turns=True)
        state = PatchState(
            op=op, num_heads=config.num_heads, size=config.size, cos=cos, sin=sin, windows=None
        )
        for index, layer in enumerate(self.layers):
            with op.scope(f"layers.{index}"):
                x = layer.forward(op, x, state)
        return [self.projector(op, x)]
