"""Features of Qwen3-ASR: Whisper's log-mel in chunks of a second, and windows of chunks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.core.graph_io import AUDIO_MASK, AUDIO_ROWS, INPUT_FEATURES
from edgellm.core.model_spec import AudioEncoderSpec
from edgellm.multimodal.audio_features.clip import Clip
from edgellm.multimodal.log_mel import log_mel

_HALVINGS = 3  # of frames, by convolutions


def shapes(spec: AudioEncoderSpec) -> dict[str, list[int | str]]:
    """See `edgellm.multimodal.audio_features`."""
    return {
        INPUT_FEATURES: ["chunks", spec.num_mel_bins, spec.chunk_frames],
        AUDIO_ROWS: ["windows", "window_tokens"],
        AUDIO_MASK: ["windows", "window_tokens", "window_tokens"],
    }


def prepare(samples: NDArray[np.float32], spec: AudioEncoderSpec) -> Clip:
    """See `edgellm.multimodal.audio_features`; the last chunk and the last window are padded."""
    features = log_mel(samples, spec.num_mel_bins)
    count = features.shape[1]
    chunks = -(-count // spec.chunk_frames)
    features = np.pad(features, ((0, 0), (0, chunks * spec.chunk_frames - count)))
    apart = features.reshape(spec.num_mel_bins, chunks, spec.chunk_frames).transpose(1, 0, 2)
    num_tokens = _num_tokens(count, spec)
    size = min(num_tokens, spec.window_chunks * spec.chunk_tokens)
    rows = np.arange(-(-num_tokens // size) * size).reshape(-1, size)
    is_token = rows < num_tokens
    return Clip(
        inputs={
            INPUT_FEATURES: np.ascontiguousarray(apart),
            AUDIO_ROWS: np.minimum(rows, num_tokens - 1),
            AUDIO_MASK: np.repeat(is_token[:, None], size, axis=1),
        },
        num_tokens=num_tokens,
    )


def _num_tokens(num_frames: int, spec: AudioEncoderSpec) -> int:
    whole, rest = divmod(num_frames, spec.chunk_frames)
    for _ in range(_HALVINGS):
        rest = (rest + 1) // 2
    return whole * spec.chunk_tokens + rest
