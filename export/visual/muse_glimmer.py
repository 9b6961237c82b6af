"""Muse-Glimmer's encoder: large windows, learned and rotary positions, and an adapter.

Shapes: P patches, d width, M merge size, H hidden size of the language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.core.errors import UnsupportedModelError
from edgellm.core.model_spec import VisionSpec
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.reader import REMEDY, ConfigReader
from edgellm.export.config.visual import check_heads, language_size, read_activation, read_theta
from edgellm.export.layers.activations import activate
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.mlp import FeedForward
from edgellm.export.layers.norm import LayerNorm, UnweightedRMSNorm
from edgellm.export.layers.patches import (
    PatchState,
    Windows,
    frames_first,
    interpolate,
    rotary_tables,
)
from edgellm.export.onnx.builder import Op
from edgellm.export.visual import qwen2_vl

TINY = {
    "model_type": "muse_glimmer",
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "layer_types": ["window_attention", "full_attention", "window_attention"],
        "patch_size": 4,
        "pos_emb_height": 6,
        "pos_emb_width": 6,
    },
    "text_config": {
        "model_type": "muse_glimmer_text",
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
    },
    "out_hidden_size": 128,
    "projector_hidden_size": 56,
    "image_token_id": 90,
    "video_token_id": 91,
}
_FULL, _WINDOW = "full_attention", "window_attention"
_EPSILON = 1e-5  # of the norms in blocks; no config has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(qwen2_vl.Config):
    """The encoder's facts."""

    epsilon: float  # of the norms before and after the blocks
    adapter_size: int
    adapter_activation: str
    language_epsilon: float  # of the norm of image embeddings

    @classmethod
    def from_hf(cls, vision: ConfigReader, model: ConfigReader) -> qwen2_vl.Config:
        """Read `vision_config`, and the encoder's keys in the rest of config.json."""
        size, heads = (
            vision.positive("hidden_size", 1536),
            vision.positive("num_attention_heads", 16),
        )
        depth, merge = vision.positive("num_hidden_layers", 50), vision.positive("merge_size", 2)
        side = vision.positive("pos_emb_height", 32)
        vision.expect("pos_emb_width", side)
        vision.skip("max_position_embeddings")
        if (width := model.positive("out_hidden_size", 6144)) != size * merge**2:
            raise UnsupportedModelError(
                f"config.json: out_hidden_size = {width}, but the encoder's outputs have "
                f"{size} * {merge**2} values",
                hint=REMEDY,
            )
        text = ConfigReader(model.read("text_config", dict, {}))
        full = _read_full(vision, depth)
        return cls(
            depth=depth,
            size=size,
            inner_size=vision.positive("intermediate_size", 8960),
            num_heads=heads,
            head_dim=check_heads(size, heads, multiple=4),
            activation=read_activation(vision, "hidden_act", "gelu"),
            out_size=language_size(model),
            patch_size=vision.positive("patch_size", 14),
            temporal_patch_size=vision.positive("patch_temporal", 2),
            merge_size=merge,
            theta=read_theta(vision),
            window_size=side if len(full) < depth else 0,
            full_attention=full,
            position_grid=side,
            epsilon=vision.read("layer_norm_eps", float, 1e-5),
            adapter_size=model.positive("projector_hidden_size", 4096),
            adapter_activation=read_activation(model, "projector_hidden_act", "gelu"),
            language_epsilon=text.read("rms_norm_eps", float, 1e-5),
        )

    def spec(self, model_type: str, num_parameters: int) -> VisionSpec:
        """The spec for the manifest."""
        spec = qwen2_vl.Config.spec(self, model_type, num_parameters)
        return replace(spec, exchanges_positions=True)


def _read_full(vision: ConfigReader, depth: int) -> tuple[int, ...]:
    """Layers without windows."""
    last = depth - 1
    usual = [_WINDOW if (at + 1) % 4 and at != last else _FULL for at in range(depth)]
    found = vision.read("layer_types", list, usual)
    if len(found) != depth or not {*found} <= {_FULL, _WINDOW}:
        raise UnsupportedModelError(
            f"config.json: layer_types = {found} should have {_FULL!r} or {_WINDOW!r} for each "
            f"of {depth} layers",
            hint=REMEDY,
        )
    return tuple(at for at, kind in enumerate(found) if kind == _FULL)


class Attention:
    """Self-attention among all patches, or those of a window."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.q_proj, self.k_proj, self.v_proj, self.proj = (
            Linear(weights / name, config.size, config.size, bias=True)
            for name in ("q_proj", "k_proj", "v_proj", "proj")
        )

    def forward(self, op: Op, x: ir.Value, state: PatchState, *, windowed: bool) -> ir.Value:
        """X [1, P, d] -> [1, P, d]."""
        q, k, v = self.q_proj(op, x), self.k_proj(op, x), self.v_proj(op, x)
        return self.proj(op, state.attend(q, k, v, windowed=windowed))


class Block:
    """Pre-norm transformer block."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.norm1 = LayerNorm(weights / "norm1", config.size, _EPSILON)
        self.norm2 = LayerNorm(weights / "norm2", config.size, _EPSILON)
        self.attn = Attention(config, weights / "attn")
        self.mlp = FeedForward(
            first=weights / "mlp.fc1",
            second=weights / "mlp.fc2",
            sizes=(config.size, config.inner_size, config.size),
            activation=config.activation,
        )

    def forward(self, op: Op, x: ir.Value, state: PatchState, *, windowed: bool) -> ir.Value:
        """X [1, P, d] -> [1, P, d]."""
        x = op.Add(x, self.attn.forward(op, self.norm1(op, x), state, windowed=windowed))
        return op.Add(x, self.mlp(op, self.norm2(op, x)))


class Adapter:
    """Blocks of M * M patches to tokens."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.size, self.merged = config.size, config.size * config.merge_size**2
        self.activation = config.adapter_activation
        self.vision_adapter = FeedForward(
            first=weights / "vision_adapter.fc1",
            second=weights / "vision_adapter.fc2",
            sizes=(self.merged, config.adapter_size, config.adapter_size),
            activation=self.activation,
            bias=False,
        )
        self.vision_projection = Linear(
            weights / "vision_projection", config.adapter_size, config.out_size, bias=False
        )
        self.norm = UnweightedRMSNorm(config.out_size, config.language_epsilon)

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the network; x [1, P, d] -> [P / M^2, H]."""
        blocks = op.Reshape(x, op.constant([-1, self.merged // self.size, self.size]))
        # Values of a channel are consecutive
        rows = op.Reshape(op.Transpose(blocks, perm=[0, 2, 1]), op.constant([-1, self.merged]))
        adapted = activate(op, self.vision_adapter(op, rows), self.activation)
        return self.norm(op, self.vision_projection(op, adapted))


class Model:
    """Patch embedding, learned positions, blocks and adapter."""

    parts = ("vision_tower", "vision_adapter", "vision_projection")

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config, tower = config, weights / "vision_tower"
        embedder = tower / "patch_embedder"
        values = 3 * config.temporal_patch_size * config.patch_size**2
        self.patch_embedding = Linear(embedder / "patch_embedding", values, config.size, bias=False)
        self.position_embedding_table = embedder / "position_embedding_table"
        self.ln_pre = LayerNorm(tower / "ln_pre", config.size, config.epsilon)
        self.layers = [Block(config, tower / f"layers.{index}") for index in range(config.depth)]
        self.ln_post = LayerNorm(tower / "ln_post", config.size, config.epsilon)
        self.adapter = Adapter(config, weights)

    def forward(self, op: Op, inputs: Mapping[str, ir.Value]) -> list[ir.Value]:
        """Inputs by contract name -> tokens [P / M^2, H]."""
        x, state = self.ln_pre(op, self._embed(op, inputs)), self._begin(op, inputs)
        for index, layer in enumerate(self.layers):
            with op.scope(f"layers.{index}"):
                windowed = index not in self.config.full_attention
                x = layer.forward(op, x, state, windowed=windowed)
        return [self.adapter(op, self.ln_post(op, x))]

    def _embed(self, op: Op, inputs: Mapping[str, ir.Value]) -> ir.Value:
        """Patches with their learned positions, [1, P, d]."""
        config = self.config
        sizes = config.temporal_patch_size, config.patch_size
        patches = frames_first(op, inputs[graph_io.PIXEL_VALUES], *sizes)
        x = self.patch_embedding(op, patches)
        with op.scope("position_embedding_table"):
            shape = config.position_grid**2, config.size
            table = op.parameter(self.position_embedding_table.take("weight", shape, op.dtype))
            index, weight = (
                inputs[name] for name in (graph_io.POS_EMBED_INDEX, graph_io.POS_EMBED_WEIGHT)
            )
            return op.Add(x, interpolate(op, table, index, weight))

    def _begin(self, op: Op, inputs: Mapping[str, ir.Value]) -> PatchState:
        """Append nodes that all layers share."""
        config = self.config
        with op.scope("positions"):  # columns before rows, from 1 on
            exchanged = op.Gather(inputs[graph_io.PATCH_POSITIONS], op.constant([1, 0]), axis=1)
            positions = op.Add(exchanged, op.constant(1))
        cos, sin = rotary_tables(op, positions, config.head_dim, config.theta)
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
