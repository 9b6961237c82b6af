"""The encoder of MiniCPM-V: SigLIP (arXiv 2303.15343) of any size, with patches merged twice.

After some blocks, patches attend in windows of 2 by 2, which are merged; after the last block, 2 by
2 merged patches become a token. With the `downsample_mode` 4x the first merge is left out. A pass
has a whole image, or a slice of one. In the hidden states the patches of a window are consecutive,
and so are the windows of a token: merging is a reshape.
Shapes: P patches, d width, H hidden size of the language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.core.errors import UnsupportedModelError
from edgellm.core.model_spec import VisionSpec
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.reader import REMEDY, ConfigReader
from edgellm.export.config.visual import check_heads, language_size, read_activation, read_square
from edgellm.export.layers.embedding import Embedding
from edgellm.export.layers.mlp import FeedForward
from edgellm.export.layers.norm import LayerNorm
from edgellm.export.layers.patches import PatchEmbedding, average_blocks
from edgellm.export.layers.tiles import TileAttention
from edgellm.export.onnx.builder import Op
from edgellm.export.visual import idefics3, qwen3_5

_SIDE, _WINDOW = 2, 4  # patches that are merged: along each side, and together
_PROJECTOR_EPSILON = 1e-6  # no config has it

TINY = {
    "model_type": "minicpmv4_6",
    "vision_config": {
        "model_type": "minicpmv4_6_vision",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 4,
    },
    "text_config": {
        **qwen3_5.TINY["text_config"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "insert_layer_id": 1,
    "image_token_id": 90,
    "video_token_id": 91,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The encoder's facts."""

    depth: int
    merged_after: int | None  # the block whose output is merged in windows; None: there is none
    size: int  # d
    inner_size: int
    num_heads: int
    activation: str
    epsilon: float
    out_size: int  # H
    patch_size: int
    position_grid: int

    @classmethod
    def from_hf(cls, vision: ConfigReader, model: ConfigReader) -> Config:
        """Read `vision_config`, and the encoder's keys in the rest of config.json.

        Raises:
            UnsupportedModelError: windows that are not 2 by 2, or keys that do not fit together.
        """
        vision.expect("num_channels", 3)
        vision.expect("window_kernel_size", [_SIDE] * 2)
        vision.optional("insert_layer_id", int)  # a copy of the outer one, which counts
        model.expect("merge_kernel_size", [_SIDE] * 2)
        model.expect("merger_times", 1)
        merges_windows = model.choice("downsample_mode", "16x", "4x") == "16x"
        model.expect("drop_vision_last_layer", False)
        size = vision.positive("hidden_size", 768)
        num_heads = vision.positive("num_attention_heads", 12)
        check_heads(size, num_heads)
        image_size, patch_size = (
            read_square(vision, key, default)
            for key, default in (("image_size", 224), ("patch_size", 16))
        )
        return cls(
            depth=vision.positive("num_hidden_layers", 12),
            merged_after=model.read("insert_layer_id", int, 6) if merges_windows else None,
            size=size,
            inner_size=vision.positive("intermediate_size", 3072),
            num_heads=num_heads,
            activation=read_activation(vision, "hidden_act", "gelu_pytorch_tanh"),
            epsilon=vision.read("layer_norm_eps", float, 1e-6),
            out_size=language_size(model),
            patch_size=patch_size,
            position_grid=image_size // patch_size,
        )

    def __post_init__(self) -> None:
        if self.merged_after is not None and not 0 <= self.merged_after < self.depth:
            raise UnsupportedModelError(
                f"config.json: insert_layer_id = {self.merged_after} is none of the "
                f"{self.depth} blocks of the encoder",
                hint=REMEDY,
            )
        if not self.position_grid:
            raise UnsupportedModelError(
                "config.json: image_size of the encoder is smaller than its patch_size",
                hint=REMEDY,
            )

    @property
    def merge_size(self) -> int:
        """Patches along a side of a token."""
        return _SIDE if self.merged_after is None else _SIDE**2

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
            has_nearest_positions=True,
            num_deepstack=0,
            image_size=0,
            tokens_per_tile=0,
            num_parameters=num_parameters,
        )


class Embeddings:
    """Patches as a linear layer, and learned positions."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.patch_embedding = PatchEmbedding(
            weights=weights / "patch_embedding",
            kernel=(3, config.patch_size, config.patch_size),
            size=config.size,
            bias=True,
        )
        self.position_embedding = Embedding(
            weights=weights / "position_embedding",
            vocab_size=config.position_grid**2,
            size=config.size,
        )

    def __call__(self, op: Op, patches: ir.Value, positions: ir.Value) -> ir.Value:
        """Append the layers; patches [P, 3*p*p], positions int64 [1, P] -> [1, P, d]."""
        return op.Add(self.patch_embedding(op, patches), self.position_embedding(op, positions))


class WindowMerger:
    """Attention in windows, whose patches are then merged by a network and by their average."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.size, joined = config.size, _WINDOW * config.size
        self.layer_norm1 = LayerNorm(weights / "layer_norm1", config.size, config.epsilon)
        self.self_attn = TileAttention(
            weights=weights / "self_attn",
            size=config.size,
            num_heads=config.num_heads,
            bias=True,
            output="out_proj",
        )
        self.pre_norm = LayerNorm(weights / "pre_norm", joined, config.epsilon)
        self.mlp = FeedForward(
            first=weights / "linear_1",
            second=weights / "linear_2",
            sizes=(joined, _WINDOW * config.inner_size, config.size),
            activation="gelu_pytorch_tanh",
        )

    def arrange(self, op: Op, x: ir.Value) -> ir.Value:
        """Put the patches of a window next to each other; x [1, P, d] -> the same shape."""
        with op.scope("windows"):
            # A token has 4 by 4 patches row by row: window, patch, window, patch of each axis
            apart = op.Reshape(x, op.constant([-1, *[_SIDE] * 4, self.size]))
            windows = op.Transpose(apart, perm=[0, 1, 3, 2, 4, 5])
            return op.Reshape(windows, op.constant([1, -1, self.size]))

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the layers; x [1, P, d] -> [1, P / 4, d]."""
        with op.scope("vit_merger"):
            x = op.Reshape(x, op.constant([-1, _WINDOW, self.size]))
            x = op.Add(x, self.self_attn(op, self.layer_norm1(op, x)))
            joined = op.Reshape(x, op.constant([-1, _WINDOW * self.size]))
            average = average_blocks(op, x, _WINDOW, self.size)
            merged = op.Add(self.mlp(op, self.pre_norm(op, joined)), average)
            return op.Unsqueeze(merged, op.constant([0]))


class Model:
    """Embeddings, SigLIP's blocks with a merger among them, norm and projector."""

    parts = ("vision_tower", "merger")

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config = config
        tower, projector = weights / "vision_tower", weights / "merger.mlp.0"
        self.embeddings = Embeddings(config, tower / "embeddings")
        self.layers = [
            idefics3.EncoderLayer(config, tower / f"encoder.layers.{index}")
            for index in range(config.depth)
        ]
        self.vit_merger = None
        if config.merged_after is None:
            _drop_all(tower / "vit_merger")
        else:
            self.vit_merger = WindowMerger(config, tower / "vit_merger")
        self.post_layernorm = LayerNorm(tower / "post_layernorm", config.size, config.epsilon)
        self.joined = _WINDOW * config.size
        self.pre_norm = LayerNorm(projector / "pre_norm", self.joined, _PROJECTOR_EPSILON)
        self.projector = FeedForward(
            first=projector / "linear_1",
            second=projector / "linear_2",
            sizes=(self.joined, self.joined, config.out_size),
            activation="gelu",
        )

    def forward(self, op: Op, inputs: Mapping[str, ir.Value]) -> list[ir.Value]:
        """Inputs by contract name -> tokens [P / M^2, H]."""
        x = self.embeddings(op, inputs[graph_io.PIXEL_VALUES], inputs[graph_io.POS_EMBED_INDEX])
        if self.vit_merger is not None:
            x = self.vit_merger.arrange(op, x)
        for index, layer in enumerate(self.layers):
            with op.scope(f"layers.{index}"):
                x = layer.forward(op, x)
            if self.vit_merger is not None and index == self.config.merged_after:
                x = self.vit_merger(op, x)
        rows = op.Reshape(self.post_layernorm(op, x), op.constant([-1, self.joined]))
        return [self.projector(op, self.pre_norm(op, rows))]


def _drop_all(weights: Weights) -> None:
    """Count all tensors here as taken."""
    begin = weights.prefix
    weights.drop(*(n.removeprefix(begin) for n in weights.unused() if n.startswith(begin)))
