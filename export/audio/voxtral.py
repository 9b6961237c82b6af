"""Voxtral's encoder (arXiv 2507.13264): Whisper's over windows, then a projector of joined rows.

Shapes: W windows of F frames and A = F / 2 positions, d width, D inner size, H hidden size of the
language model. Source: transformers' models/voxtral.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.core.errors import UnsupportedModelError
from edgellm.core.model_spec import AudioEncoderSpec
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.activations import ACTIVATIONS
from edgellm.export.config.audio import FRAMES_PER_S, LOG_MEL, expect_settings, heads_of
from edgellm.export.config.reader import REMEDY, ConfigReader
from edgellm.export.config.visual import language_size
from edgellm.export.layers.audio_blocks import WindowEncoder
from edgellm.export.layers.mlp import FeedForward
from edgellm.export.onnx.builder import Op

TINY = {
    "model_type": "voxtral",
    "audio_config": {
        "model_type": "voxtral_encoder",
        "num_mel_bins": 16,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_source_positions": 50,
    },
    "text_config": {
        "model_type": "llama",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The encoder's facts."""

    depth: int
    size: int  # d
    num_heads: int
    inner_size: int  # D
    activation: str
    projector_activation: str
    num_mel_bins: int
    num_positions: int  # A
    out_size: int  # H

    @classmethod
    def from_hf(
        cls, audio: ConfigReader, model: ConfigReader, extractor: Mapping[str, Any]
    ) -> Config:
        """Read `audio_config`, the projector's keys, and settings of the feature extractor."""
        audio.skip("dropout", "activation_dropout", "layerdrop", "vocab_size")
        audio.expect("scale_embedding", False)
        bins, size = audio.positive("num_mel_bins", 128), audio.positive("hidden_size", 1280)
        inner, positions = (
            audio.positive(key, default)
            for key, default in (("intermediate_size", 5120), ("max_source_positions", 1500))
        )
        if positions * size % inner:
            raise UnsupportedModelError(
                f"config.json: intermediate_size {inner} does not divide {positions} positions of "
                f"{size}",
                hint=REMEDY,
            )
        seconds = 2 * positions / FRAMES_PER_S
        wanted = {"feature_size": bins, "chunk_length": seconds, "padding_value": 0.0, **LOG_MEL}
        expect_settings(extractor, wanted)
        return cls(
            depth=audio.positive("num_hidden_layers", 32),
            size=size,
            num_heads=heads_of(audio, "num_attention_heads", size, 20),
            inner_size=inner,
            activation=audio.choice("activation_function", "gelu", *ACTIVATIONS),
            projector_activation=model.choice("projector_hidden_act", "gelu", *ACTIVATIONS),
            num_mel_bins=bins,
            num_positions=positions,
            out_size=language_size(model),
        )

    def spec(self, model_type: str, num_parameters: int) -> AudioEncoderSpec:
        """The spec for the manifest."""
        return AudioEncoderSpec(
            model_type=model_type,
            hidden_size=self.out_size,
            num_parameters=num_parameters,
            num_mel_bins=self.num_mel_bins,
            chunk_frames=2 * self.num_positions,
            chunk_tokens=self.num_positions * self.size // self.inner_size,
        )


class Model:
    """Whisper's encoder, then a projector."""

    parts = ("audio_tower", "multi_modal_projector")

    def __init__(self, config: Config, weights: Weights) -> None:
        self.audio_tower = WindowEncoder(
            weights=weights / "audio_tower",
            num_mel_bins=config.num_mel_bins,
            num_positions=config.num_positions,
            size=config.size,
            depth=config.depth,
            num_heads=config.num_heads,
            inner_size=config.inner_size,
            activation=config.activation,
        )
        self.inner_size, projector = config.inner_size, weights / "multi_modal_projector"
        self.projector = FeedForward(
            first=projector / "linear_1",
            second=projector / "linear_2",
            sizes=(config.inner_size, config.out_size, config.out_size),
            activation=config.projector_activation,
            bias=False,
        )

    def forward(self, op: Op, inputs: Mapping[str, ir.Value]) -> ir.Value:
        """Inputs by contract name -> tokens [W * A * d / D, H]."""
        x = self.audio_tower.forward(op, inputs[graph_io.INPUT_FEATURES])
        with op.scope("joined"):
            rows = op.Reshape(x, op.constant([-1, self.inner_size]))
        return self.projector(op, rows)
