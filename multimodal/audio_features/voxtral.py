"""Features of Voxtral: Whisper's log-mel of a clip that zeros extend to whole windows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.core.graph_io import INPUT_FEATURES
from edgellm.core.model_spec import AudioEncoderSpec
from edgellm.multimodal.audio_features.clip import Clip
from edgellm.multimodal.log_mel import HOP, log_mel


def shapes(spec: AudioEncoderSpec) -> dict[str, list[int | str]]:
    """See `edgellm.multimodal.audio_features`."""
    return {INPUT_FEATURES: ["windows", spec.num_mel_bins, spec.chunk_frames]}


def prepare(samples: NDArray[np.float32], spec: AudioEncoderSpec) -> Clip:
    """See `edgellm.multimodal.audio_features`; tokens of the padding count."""
    size = HOP * spec.chunk_frames
    windows = -(-len(samples) // size)
    features = log_mel(np.pad(samples, (0, windows * size - len(samples))), spec.num_mel_bins)
    apart = features.reshape(spec.num_mel_bins, windows, spec.chunk_frames)
    return Clip(
        inputs={INPUT_FEATURES: np.ascontiguousarray(apart.transpose(1, 0, 2))},
        num_tokens=windows * spec.chunk_tokens,
    )
