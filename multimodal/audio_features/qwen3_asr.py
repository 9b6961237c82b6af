"""Features of Qwen3-ASR: Whisper's log-mel in chunks of a second, and windows of chunks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.core.graph_io import AUDIO_MASK, INPUT_FEATURES
from edgellm.core.model_spec import AudioEncoderSpec
from edgellm.multimodal.audio_features.clip import Clip
from edgellm.multimodal.log_mel import log_mel

_HALVINGS = 3  # of frames, by convolutions


def shapes(spec: AudioEncoderSpec) -> dict[str, list[int | str]]:
    """See `edgellm.multimodal.audio_features`."""
    chunk = [spec.num_mel_bins, spec.chunk_frames]
    return {
        INPUT_FEATURES: ["windows", "chunks", *chunk],
        AUDIO_MASK: ["windows", "window_tokens"],
    }


def prepare(samples: NDArray[np.float32], spec: AudioEncoderSpec) -> Clip:
    """See `edgellm.multimodal.audio_features`; the last window is padded."""
    features = log_mel(samples, spec.num_mel_bins)
    count = features.shape[1]
    chunks = -(-count // spec.chunk_frames)
    per_window = min(chunks, spec.window_chunks)
    windows = -(-chunks // per_window)
    padded = windows * per_window * spec.chunk_frames
    features = np.pad(features, ((0, 0), (0, padded - count)))
    shape = spec.num_mel_bins, windows, per_window, spec.chunk_frames
    num_tokens = _num_tokens(count, spec)
    rows = np.arange(windows * per_window * spec.chunk_tokens).reshape(windows, -1)
    return Clip(
        inputs={
            INPUT_FEATURES: np.ascontiguousarray(features.reshape(shape).transpose(1, 2, 0, 3)),
            AUDIO_MASK: rows < num_tokens,
        },
        num_tokens=num_tokens,
    )


def _num_tokens(num_frames: int, spec: AudioEncoderSpec) -> int:
    whole, rest = divmod(num_frames, spec.chunk_frames)
    for _ in range(_HALVINGS):
        rest = (rest + 1) // 2
    return whole * spec.chunk_tokens + rest
