"""Gemma 4 12B's embedder of audio, without layers of attention: each token is a run of samples.

A norm and a linear layer. Source: transformers' models/gemma4_unified.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from edgellm.core import graph_io
from edgellm.core.model_spec import AudioEncoderSpec
from edgellm.export.audio import gemma4
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.audio import expect_settings
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.visual import language_size
from edgellm.export.layers.linear import Linear
from edgellm.export.layers.norm import UnweightedRMSNorm
from edgellm.export.onnx.builder import Op

TINY = {
    **gemma4.TINY,
    "model_type": "gemma4_unified",
    "audio_config": {"model_type": "gemma4_unified_audio", "audio_embed_dim": 640},
    "text_config": {
        **gemma4.TINY["text_config"],
        "model_type": "gemma4_unified_text",
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
    },
}
for _key in ("hidden_size_per_layer_input", "vocab_size_per_layer_input"):
    del TINY["text_config"][_key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The embedder's facts."""

    num_samples: int  # of a token
    epsilon: float
    out_size: int  # H, hidden size of the language model

    @classmethod
    def from_hf(
        cls, audio: ConfigReader, model: ConfigReader, extractor: Mapping[str, Any]
    ) -> Config:
        """Read `audio_config`, and the settings of the feature extractor."""
        count = audio.positive("audio_embed_dim", 640)
        for key in ("hidden_size", "output_proj_dims", "audio_samples_per_token"):
            audio.expect(key, count)
        wanted = {"sampling_rate": 16000, "padding_value": 0.0, "audio_samples_per_token": count}
        expect_settings(extractor, wanted)
        return cls(
            num_samples=count,
            epsilon=audio.read("rms_norm_eps", float, gemma4.EPSILON),
            out_size=language_size(model),
        )

    def spec(self, model_type: str, num_parameters: int) -> AudioEncoderSpec:
        """The spec for the manifest."""
        return AudioEncoderSpec(
            model_type=model_type,
            hidden_size=self.out_size,
            num_parameters=num_parameters,
            num_mel_bins=0,
            chunk_frames=self.num_samples,
            chunk_tokens=1,
        )


class Model:
    """Norm and projection."""

    parts = ("embed_audio",)

    def __init__(self, config: Config, weights: Weights) -> None:
        self.norm = UnweightedRMSNorm(config.num_samples, config.epsilon)
        self.embedding_projection = Linear(
            weights / "embed_audio.embedding_projection",
            config.num_samples,
            config.out_size,
            bias=False,
        )

    def forward(self, op: Op, inputs: Mapping[str, ir.Value]) -> ir.Value:
        """Inputs by contract name -> tokens [T, H]."""
        return self.embedding_projection(op, self.norm(op, inputs[graph_io.INPUT_FEATURES]))
