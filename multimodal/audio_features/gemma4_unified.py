"""Features of Gemma 4 12B: samples, a run of them for each token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.core.graph_io import INPUT_FEATURES
from edgellm.core.model_spec import AudioEncoderSpec
from edgellm.multimodal.audio_features.clip import Clip


def shapes(spec: AudioEncoderSpec) -> dict[str, list[int | str]]:
    """See `edgellm.multimodal.audio_features`."""
    return {INPUT_FEATURES: ["audio_rows", spec.chunk_frames]}


def prepare(samples: NDArray[np.float32], spec: AudioEncoderSpec) -> Clip:
    """See `edgellm.multimodal.audio_features`; zeros extend the last run."""
    rows = np.pad(samples, (0, -len(samples) % spec.chunk_frames)).reshape(-1, spec.chunk_frames)
    return Clip(inputs={INPUT_FEATURES: rows}, num_tokens=len(rows))
