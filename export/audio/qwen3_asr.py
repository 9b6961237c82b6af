"""Qwen3-ASR's encoder (arXiv 2601.21337): convolutions over chunks, attention in windows.

Shapes: C chunks of F frames and K tokens, W windows of T tokens, d width, H hidden size of the
language model. Source: transformers' models/qwen3_asr.
"""

from __future__ import annotations

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
from edgellm.export.config.audio import LOG_MEL, expect_settings, heads_of
from edgellm.export.config.reader import REMEDY, ConfigReader
from edgellm.export.config.visual import language_size
from edgellm.export.layers.activations import activate
from edgellm.export.layers.audio_blocks import EPSILON, Convolution, EncoderLayer
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.norm import LayerNorm
from edgellm.export.layers.patches import MASKED
from edgellm.export.onnx.builder import Op

TINY = {
    "model_type": "qwen3_asr",
    "audio_config": {
        "model_type": "qwen3_asr_encoder",
        "num_mel_bins": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 40,
        "d_model": 32,
        "n_window_infer": 200,
        "output_dim": 48,
        "downsample_hidden_size": 6,
    },
    "text_config": {
        "model_type": "qwen3",
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
    },
    "audio_token_id": 90,
}
_CHUNK = 100  # frames; transformers counts tokens for this size alone
_TOKENS = 13  # of a chunk
_HALVINGS = 3  # of mel bins and frames, by convolutions
_MAX_TIMESCALE = 10000  # of sinusoidal positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The encoder's facts."""

    depth: int
    size: int  # d
    num_heads: int
    inner_size: int
    activation: str
    num_mel_bins: int
    channels: int  # of convolutions
    window_chunks: int  # of a window
    out_size: int  # H
    min_samples: int  # of a clip

    @classmethod
    def from_hf(
        cls, audio: ConfigReader, model: ConfigReader, extractor: Mapping[str, Any]
    ) -> Config:
        """Read `audio_config`, and the settings of the feature extractor."""
        audio.skip("dropout", "activation_dropout")
        audio.expect("scale_embedding", False)
        audio.expect("n_window", _CHUNK // 2)
        positions = audio.positive("max_position_embeddings", _TOKENS)
        if positions < _TOKENS:
            raise UnsupportedModelError(
                f"config.json: max_position_embeddings {positions} is less than the {_TOKENS} "
                "tokens of a chunk",
                hint=REMEDY,
            )
        window = audio.positive("n_window_infer", 800)
        if window % _CHUNK:
            raise UnsupportedModelError(
                f"config.json: n_window_infer {window} is no multiple of {_CHUNK} frames",
                hint=REMEDY,
            )
        bins, size = audio.positive("num_mel_bins", 128), audio.positive("d_model", 1024)
        out_size = language_size(model)
        audio.expect("output_dim", out_size)
        expect_settings(
            extractor,
            {**LOG_MEL, "feature_size": bins, "n_window": _CHUNK // 2, "padding_value": 0.0},
        )
        return cls(
            depth=audio.positive("encoder_layers", 24),
            size=size,
            num_heads=heads_of(audio, "encoder_attention_heads", size, 16),
            inner_size=audio.positive("encoder_ffn_dim", 4096),
            activation=audio.choice("activation_function", "gelu", *ACTIVATIONS),
            num_mel_bins=bins,
            channels=audio.positive("downsample_hidden_size", 480),
            window_chunks=window // _CHUNK,
            out_size=out_size,
            min_samples=max(1, int(extractor.get("min_length", 8000))),
        )

    def spec(self, model_type: str, num_parameters: int) -> AudioEncoderSpec:
        """The spec for the manifest."""
        return AudioEncoderSpec(
            model_type=model_type,
            hidden_size=self.out_size,
            num_parameters=num_parameters,
            num_mel_bins=self.num_mel_bins,
            chunk_frames=_CHUNK,
            chunk_tokens=_TOKENS,
            window_chunks=self.window_chunks,
            min_samples=self.min_samples,
        )


class Model:
    """Convolutions, sinusoidal positions of a chunk, blocks, final norm, projector."""

    parts = ("audio_tower", "multi_modal_projector")

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config, tower, size = config, weights / "audio_tower", config.size
        ends = [(1, config.channels), *[(config.channels, config.channels)] * (_HALVINGS - 1)]
        self.convolutions = [
            Convolution(weights=tower / f"conv2d{index}", channels=channels, stride=2, num_axes=2)
            for index, channels in enumerate(ends, 1)
        ]
        self.bins = config.num_mel_bins
        for _ in range(_HALVINGS):
            self.bins = (self.bins + 1) // 2
        self.conv_out = Linear(tower / "conv_out", config.channels * self.bins, size, bias=False)
        self.layers = [
            EncoderLayer(
                weights=tower / f"layers.{index}",
                size=size,
                num_heads=config.num_heads,
                inner_size=config.inner_size,
                activation=config.activation,
                key_bias=True,
            )
            for index in range(config.depth)
        ]
        self.ln_post = LayerNorm(tower / "ln_post", size, EPSILON)
        projector = weights / "multi_modal_projector"
        self.linear_1 = Linear(projector / "linear_1", size, size, bias=True)
        self.linear_2 = Linear(projector / "linear_2", size, config.out_size, bias=True)

    def forward(self, op: Op, inputs: Mapping[str, ir.Value]) -> ir.Value:
        """Inputs by contract name -> tokens [W * T, H]."""
        x = self._chunks(op, inputs[graph_io.INPUT_FEATURES])
        with op.scope("windows"):
            x = op.Gather(x, inputs[graph_io.AUDIO_ROWS], axis=0)  # [W, T, d]
            shut = op.constant(MASKED[op.dtype], op.dtype)
            mask = op.Where(inputs[graph_io.AUDIO_MASK], op.constant(0, op.dtype), shut)
            mask = op.Unsqueeze(mask, op.constant([1]))
        for index, layer in enumerate(self.layers):
            with op.scope(f"layers.{index}"):
                x = layer.forward(op, x, mask)
        x = self.linear_1(op, self.ln_post(op, x))
        x = self.linear_2(op, activate(op, x, self.config.activation))
        return op.Reshape(x, op.constant([-1, self.config.out_size]))

    def _chunks(self, op: Op, features: ir.Value) -> ir.Value:
        """Features [C, mel bins, F] -> [C * K, d]."""
        config = self.config
        with op.scope("chunks"):
            x = op.Unsqueeze(features, op.constant([1]))
        for each in self.convolutions:
            x = each(op, x, "gelu")
        with op.scope("chunks"):
            rows = op.Transpose(x, perm=[0, 3, 1, 2])
            rows = op.Reshape(rows, op.constant([-1, _TOKENS, config.channels * self.bins]))
        x = self.conv_out(op, rows)
        with op.scope("chunks"):
            x = op.Add(x, op.constant(_positions(config.size)[None], op.dtype))
            return op.Reshape(x, op.constant([-1, config.size]))


def _positions(size: int) -> np.ndarray:
    """Sinusoidal positions of a chunk, float32 [K, size]: sines, then cosines."""
    step = np.float32(np.log(_MAX_TIMESCALE) / (size // 2 - 1))
    frequencies = np.exp(-step * np.arange(size // 2, dtype=np.float32))
    angles = np.arange(_TOKENS, dtype=np.float32)[:, None] * frequencies[None]
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
