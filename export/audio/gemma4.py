"""Gemma 4's conformer (E2B, E4B): convolutions, local attention in blocks, causal convolutions.

Shapes: F frames, T rows in B blocks of C, K slots of a block's keys, d width, h heads of D numbers,
H hidden size of the language model. Source: transformers' models/gemma4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.core.errors import UnsupportedModelError
from edgellm.core.model_spec import AudioEncoderSpec
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.activations import ACTIVATIONS
from edgellm.export.config.audio import expect_settings, heads_of
from edgellm.export.config.reader import REMEDY, ConfigReader
from edgellm.export.config.visual import language_size
from edgellm.export.layers.activations import activate, softplus
from edgellm.export.layers.linear import ClippedLinear, Linear, clip
from edgellm.export.layers.norm import RMSNorm, UnbiasedLayerNorm, UnweightedRMSNorm
from edgellm.export.onnx.builder import Op

TINY = {
    "model_type": "gemma4",
    "audio_config": {
        "model_type": "gemma4_audio",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "subsampling_conv_channels": [16, 8],
        "attention_chunk_size": 6,
        "attention_context_left": 7,
        "output_proj_dims": 40,
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
    "audio_token_id": 90,
}
EPSILON = 1e-6  # of most norms; no config has it
_MIN_SAMPLES = 161  # of the first frame
MAX_S = 30  # of a clip; transformers cuts longer ones
_HALVINGS = 2  # of frames and mel bins
_MAX_TIMESCALE = 10000.0  # of sinusoidal positions
_WIDE = ir.DataType.FLOAT  # of attention
# What the extractor computes; see `edgellm.multimodal.audio_features.gemma4`
_FEATURES = {
    "sampling_rate": 16000,
    "padding_value": 0.0,
    "frame_length_ms": 20.0,
    "hop_length_ms": 10.0,
    "min_frequency": 0.0,
    "max_frequency": 8000.0,
    "preemphasis": 0.0,
    "fft_overdrive": False,
    "dither": 0.0,
    "input_scale_factor": 1.0,
    "mel_floor": 1e-3,
    "per_bin_mean": None,
    "per_bin_stddev": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The encoder's facts."""

    depth: int
    size: int  # d
    num_heads: int
    activation: str
    channels: tuple[int, int]  # of convolutions
    kernel: int  # of causal convolutions
    residual_weight: float
    block_rows: int  # C
    past_slots: int
    future_slots: int
    softcap: float
    masked: float  # score of keys that are not attended to
    is_clipped: bool
    epsilon: float
    bound: float  # of activations
    projected_size: int
    out_size: int  # H
    num_mel_bins: int

    @classmethod
    def from_hf(
        cls, audio: ConfigReader, model: ConfigReader, extractor: Mapping[str, Any]
    ) -> Config:
        """Read `audio_config`, and the settings of the feature extractor."""
        channels = _channels(audio)
        bins = extractor.get("feature_size", channels[0])
        if type(bins) is not int or -(-bins // 2**_HALVINGS) != channels[0] // 2**_HALVINGS:
            raise UnsupportedModelError(
                f"preprocessor_config.json: feature_size {bins!r} does not suit "
                f"subsampling_conv_channels {channels} of config.json",
                hint=REMEDY,
            )
        expect_settings(extractor, _FEATURES)
        size = audio.positive("hidden_size", 1024)
        left = audio.positive("attention_context_left", 13)
        if left < 2:
            raise UnsupportedModelError(
                f"config.json: attention_context_left {left}: a token attends to none", hint=REMEDY
            )
        right = audio.read("attention_context_right", int, 0)
        if right < 0:
            raise UnsupportedModelError(
                f"config.json: attention_context_right {right} is negative", hint=REMEDY
            )
        return cls(
            depth=audio.positive("num_hidden_layers", 12),
            size=size,
            num_heads=heads_of(audio, "num_attention_heads", size, 8),
            activation=audio.choice("hidden_act", "silu", *ACTIVATIONS),
            channels=channels,
            kernel=audio.positive("conv_kernel_size", 5),
            residual_weight=audio.read("residual_weight", float, 0.5),
            block_rows=audio.positive("attention_chunk_size", 12),
            past_slots=left - 1,
            future_slots=right,
            softcap=audio.nonzero("attention_logit_cap", 50.0),
            masked=audio.read("attention_invalid_logits_value", float, -1e9),
            is_clipped=audio.read("use_clipped_linears", bool, True),
            epsilon=audio.read("rms_norm_eps", float, EPSILON),
            bound=audio.read("gradient_clipping", float, 1e10),
            projected_size=audio.positive("output_proj_dims", 1536),
            out_size=language_size(model),
            num_mel_bins=bins,
        )

    @property
    def slots(self) -> int:
        """Slots of a block, K."""
        return self.block_rows + self.past_slots + self.future_slots

    def spec(self, model_type: str, num_parameters: int) -> AudioEncoderSpec:
        """The spec for the manifest."""
        return AudioEncoderSpec(
            model_type=model_type,
            hidden_size=self.out_size,
            num_parameters=num_parameters,
            num_mel_bins=self.num_mel_bins,
            chunk_frames=2**_HALVINGS,
            chunk_tokens=1,
            min_samples=_MIN_SAMPLES,
            max_s=MAX_S,
            block_rows=self.block_rows,
            past_slots=self.past_slots,
            future_slots=self.future_slots,
        )


def _channels(audio: ConfigReader) -> tuple[int, int]:
    """Channels of both convolutions; raises `UnsupportedModelError`."""
    found = audio.read("subsampling_conv_channels", list, [128, 32])
    are_numbers = all(type(each) is int and each > 0 for each in found)
    if len(found) != _HALVINGS or not are_numbers:
        raise UnsupportedModelError(
            f"config.json: subsampling_conv_channels {found} are not two numbers of channels",
            hint=REMEDY,
        )
    return found[0], found[1]


class Subsampling:
    """Two convolutions with norms over channels, and a linear layer; no biases."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config, self.weights = config, weights
        self.ends = (1, config.channels[0]), config.channels
        self.norms = [
            UnbiasedLayerNorm(weights / f"layer{index}.norm", outer, config.epsilon)
            for index, (_, outer) in enumerate(self.ends)
        ]
        self.width = config.channels[0] // 4 * config.channels[1]
        self.input_proj_linear = Linear(
            weights / "input_proj_linear", self.width, config.size, bias=False
        )

    def __call__(self, op: Op, features: ir.Value) -> ir.Value:
        """Features [1, F, mel bins] -> [1, tokens, d]."""
        with op.scope("frames"):
            x = op.Unsqueeze(features, op.constant([1]))
        given = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}
        for index, ((inner, outer), norm) in enumerate(zip(self.ends, self.norms, strict=True)):
            place = self.weights / f"layer{index}.conv"
            with op.scope(place.prefix.rstrip(".")):
                stored = place.take("weight", (outer, inner, 3, 3), op.dtype)
                x = op.Conv(x, op.cast(op.parameter(stored), op.dtype), **given)
                x = op.Transpose(x, perm=[0, 2, 3, 1])
                x = op.Max(norm(op, x), op.constant(0, op.dtype))
                x = op.Transpose(x, perm=[0, 3, 1, 2])
        with op.scope("frames"):
            x = op.Reshape(op.Transpose(x, perm=[0, 2, 3, 1]), op.constant([1, -1, self.width]))
        return self.input_proj_linear(op, x)


class FeedForward:
    """Half a residual step: norm, network, norm."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config, size = config, config.size
        self.ffw_layer_1, self.ffw_layer_2 = (
            ClippedLinear(weights / f"ffw_layer_{index}", sizes, is_clipped=config.is_clipped)
            for index, sizes in ((1, (size, 4 * size)), (2, (4 * size, size)))
        )
        self.pre_layer_norm, self.post_layer_norm = (
            RMSNorm(weights / f"{name}_layer_norm", size, EPSILON) for name in ("pre", "post")
        )

    def forward(self, op: Op, x: ir.Value) -> ir.Value:
        """X [1, T, d] -> [1, T, d]."""
        y = self.pre_layer_norm(op, bounded(op, x, self.config))
        y = activate(op, self.ffw_layer_1(op, y), self.config.activation)
        y = bounded(op, self.ffw_layer_2(op, y), self.config)
        y = op.Mul(self.post_layer_norm(op, y), op.constant(self.config.residual_weight, op.dtype))
        return op.Add(y, x)


class Attention:
    """Attention of blocks to their slots, with relative positions; scores are capped."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config, self.weights, size = config, weights, config.size
        self.head_dim = size // config.num_heads
        self.q_proj, self.k_proj, self.v_proj, self.post = (
            ClippedLinear(weights / name, (size, size), is_clipped=config.is_clipped)
            for name in ("q_proj", "k_proj", "v_proj", "post")
        )
        self.relative_k_proj = Linear(weights / "relative_k_proj", size, size, bias=False)

    def forward(self, op: Op, x: ir.Value, slots: ir.Value, mask: ir.Value) -> ir.Value:
        """X [1, T, d] -> [1, T, d]; slots int64 [B * K], mask bool [B, 1, C, K]."""
        config = self.config
        with op.scope(self.weights.prefix.rstrip(".")):
            stored = self.weights.take("per_dim_scale", (self.head_dim,), op.dtype)
            scale = self._wide(op, op.parameter(stored))
            scale = op.Mul(softplus(op, scale), self._number(op, self.head_dim**-0.5 / math.log(2)))
            q = op.Mul(self._blocks(op, self.q_proj(op, x), config.block_rows), scale)
            k, v = (
                self._blocks(op, op.Gather(layer(op, x), slots, axis=1), config.slots)
                for layer in (self.k_proj, self.v_proj)
            )
            k = op.Mul(k, self._number(op, math.log(1 + math.e) / math.log(2)))
            scores = op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2]))
            scores = op.Add(scores, self._shifted(op, op.MatMul(q, self._positions(op))))
            cap = self._number(op, config.softcap)
            scores = op.Mul(op.Tanh(op.Div(scores, cap)), cap)
            scores = op.Where(mask, scores, self._number(op, config.masked))
            y = op.MatMul(op.Softmax(scores, axis=-1), v)  # [B, h, C, D]
            y = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), op.constant([1, -1, config.size]))
            y = y if op.dtype == _WIDE else op.Cast(y, to=int(op.dtype))
        return self.post(op, y)

    def _blocks(self, op: Op, x: ir.Value, rows: int) -> ir.Value:
        """X [1, B * rows, d] -> [B, h, rows, D] in float32."""
        apart = op.constant([-1, rows, self.config.num_heads, self.head_dim])
        return op.Transpose(op.Reshape(self._wide(op, x), apart), perm=[0, 2, 1, 3])

    def _positions(self, op: Op) -> ir.Value:
        """Keys of relative positions, the furthest first, then zeros, [h, D, K + 1]."""
        table = op.constant(_positions(self.config)[None], op.dtype)
        keys = self._wide(op, self.relative_k_proj(op, table))
        keys = op.Reshape(keys, op.constant([-1, self.config.num_heads, self.head_dim]))
        return op.Transpose(keys, perm=[1, 2, 0])

    def _shifted(self, op: Op, x: ir.Value) -> ir.Value:
        """Scores of positions [B, h, C, K + 1] to those of slots [B, h, C, K].

        Row i is shifted right by i (arXiv 1901.02860, appendix B).
        """
        config = self.config
        rows, slots, heads = config.block_rows, config.slots, config.num_heads
        x = op.Reshape(x, op.constant([-1, heads, rows * (slots + 1)]))
        x = op.Slice(x, op.constant([0]), op.constant([rows * slots]), op.constant([2]))
        return op.Reshape(x, op.constant([-1, heads, rows, slots]))

    def _wide(self, op: Op, x: ir.Value) -> ir.Value:
        return op.cast(x, _WIDE)

    def _number(self, op: Op, value: float) -> ir.Value:
        return op.constant(np.float32(value))


class Convolution:
    """Gated linear layer, causal convolution of each channel, norm, linear layer."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config, self.weights, size = config, weights, config.size
        self.linear_start, self.linear_end = (
            ClippedLinear(weights / name, sizes, is_clipped=config.is_clipped)
            for name, sizes in (("linear_start", (size, 2 * size)), ("linear_end", (size, size)))
        )
        self.pre_layer_norm, self.conv_norm = (
            RMSNorm(weights / name, size, config.epsilon)
            for name in ("pre_layer_norm", "conv_norm")
        )

    def forward(self, op: Op, x: ir.Value) -> ir.Value:
        """X [1, T, d] -> [1, T, d]."""
        config = self.config
        y = self.linear_start(op, self.pre_layer_norm(op, x))
        place = self.weights / "depthwise_conv1d"
        with op.scope(place.prefix.rstrip(".")):
            halves = op.constant(np.full(2, config.size, np.int64))
            y, gate = op.outputs(2, "Split", y, halves, axis=-1)
            y = op.Transpose(op.Mul(y, op.Sigmoid(gate)), perm=[0, 2, 1])
            stored = place.take("weight", (config.size, 1, config.kernel), op.dtype)
            given = {
                "kernel_shape": [config.kernel],
                "pads": [config.kernel - 1, 0],
                "group": config.size,
            }
            y = op.Conv(y, op.cast(op.parameter(stored), op.dtype), **given)
            y = op.Transpose(y, perm=[0, 2, 1])
        y = activate(op, self.conv_norm(op, bounded(op, y, config)), config.activation)
        return op.Add(self.linear_end(op, y), x)


class Layer:
    """Conformer block: feed-forward, attention, convolution, feed-forward."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config = config
        self.feed_forward1 = FeedForward(config, weights / "feed_forward1")
        self.feed_forward2 = FeedForward(config, weights / "feed_forward2")
        self.self_attn = Attention(config, weights / "self_attn")
        self.lconv1d = Convolution(config, weights / "lconv1d")
        self.norm_pre_attn, self.norm_post_attn, self.norm_out = (
            RMSNorm(weights / name, config.size, EPSILON)
            for name in ("norm_pre_attn", "norm_post_attn", "norm_out")
        )

    def forward(self, op: Op, x: ir.Value, slots: ir.Value, mask: ir.Value) -> ir.Value:
        """X [1, T, d] -> [1, T, d]."""
        config, x = self.config, self.feed_forward1.forward(op, x)
        y = self.norm_pre_attn(op, bounded(op, x, config))
        y = bounded(op, self.self_attn.forward(op, y, slots, mask), config)
        x = op.Add(self.norm_post_attn(op, y), x)
        x = self.feed_forward2.forward(op, self.lconv1d.forward(op, x))
        return self.norm_out(op, bounded(op, x, config))


class Model:
    """Subsampling, blocks, projections."""

    parts = ("audio_tower", "embed_audio")

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config, tower = config, weights / "audio_tower"
        self.subsample_conv_projection = Subsampling(config, tower / "subsample_conv_projection")
        self.layers = [Layer(config, tower / f"layers.{index}") for index in range(config.depth)]
        size = config.projected_size
        self.output_proj = Linear(tower / "output_proj", config.size, size, bias=True)
        self.norm = UnweightedRMSNorm(size, config.epsilon)
        self.embedding_projection = Linear(
            weights / "embed_audio.embedding_projection", size, config.out_size, bias=False
        )

    def forward(self, op: Op, inputs: Mapping[str, ir.Value]) -> ir.Value:
        """Inputs by contract name -> rows [T, H]."""
        x = self.subsample_conv_projection(op, inputs[graph_io.INPUT_FEATURES])
        with op.scope("blocks"):
            x = op.Gather(x, inputs[graph_io.AUDIO_ROWS], axis=1)
            mask = op.Unsqueeze(inputs[graph_io.AUDIO_MASK], op.constant([1]))
        for index, layer in enumerate(self.layers):
            with op.scope(f"layers.{index}"):
                x = layer.forward(op, x, inputs[graph_io.AUDIO_SLOTS], mask)
        x = self.embedding_projection(op, self.norm(op, self.output_proj(op, x)))
        return op.Reshape(x, op.constant([-1, self.config.out_size]))


def bounded(op: Op, x: ir.Value, config: Config) -> ir.Value:
    """X between the bounds of activations; no node if their type has smaller numbers only."""
    is_wider = config.bound >= np.finfo(op.dtype.numpy()).max
    return x if is_wider else clip(op, x, -config.bound, config.bound)


def _positions(config: Config) -> np.ndarray:
    """Sinusoids of distances, the furthest first, float32 [K + 1, d]: sines, then cosines.

    Zeros follow, which `relative_k_proj` keeps.
    """
    count = config.size // 2
    step = math.log(_MAX_TIMESCALE) / max(count - 1, 1)
    frequencies = np.exp(np.arange(count, dtype=np.float32) * np.float32(-step))
    angles = np.arange(config.slots // 2, -1, -1, dtype=np.float32)[:, None] * frequencies[None]
    found = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return np.pad(found, ((0, config.slots + 1 - len(found)), (0, 0)))
