"""Features of Gemma 4 (E2B, E4B): log-mel of magnitudes each 10 ms, and blocks of a conformer."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from edgellm.core.graph_io import AUDIO_MASK, AUDIO_ROWS, AUDIO_SLOTS, INPUT_FEATURES
from edgellm.core.model_spec import AudioEncoderSpec
from edgellm.multimodal.audio import SAMPLE_RATE
from edgellm.multimodal.audio_features.clip import Clip

_FRAME, _HOP, _FFT = 320, 160, 512  # samples
_FLOOR = 1e-3  # of magnitudes, before their logarithm
_HALVINGS = 2  # of frames, by convolutions
_BLOCK = 4096  # frames computed at once


def shapes(spec: AudioEncoderSpec) -> dict[str, list[int | str]]:
    """See `edgellm.multimodal.audio_features`."""
    slots = spec.block_rows + spec.past_slots + spec.future_slots
    return {
        INPUT_FEATURES: [1, "frames", spec.num_mel_bins],
        AUDIO_ROWS: ["audio_rows"],
        AUDIO_SLOTS: ["audio_slots"],
        AUDIO_MASK: ["audio_blocks", spec.block_rows, slots],
    }


def prepare(samples: NDArray[np.float32], spec: AudioEncoderSpec) -> Clip:
    """See `edgellm.multimodal.audio_features`; frames after the last whole one are left out."""
    features = _log_mel(samples, spec.num_mel_bins)
    num_tokens = len(features)
    for _ in range(_HALVINGS):
        num_tokens = (num_tokens + 1) // 2
    blocks = -(-num_tokens // spec.block_rows)
    rows = np.arange(blocks * spec.block_rows)
    first = np.arange(blocks)[:, None] * spec.block_rows - spec.past_slots
    slots = first + np.arange(spec.block_rows + spec.past_slots + spec.future_slots)  # [B, K]
    distance = rows.reshape(blocks, -1, 1) - slots[:, None]  # [B, C, K]
    is_near = (distance >= 0) & (distance < spec.past_slots)
    is_near |= (distance < 0) & (-distance < spec.future_slots)
    is_token = (slots >= 0) & (slots < num_tokens)
    return Clip(
        inputs={
            INPUT_FEATURES: features[None],
            AUDIO_ROWS: np.minimum(rows, num_tokens - 1),
            AUDIO_SLOTS: np.clip(slots, 0, num_tokens - 1).reshape(-1),
            AUDIO_MASK: is_near & is_token[:, None],
        },
        num_tokens=num_tokens,
    )


def _log_mel(samples: NDArray[np.float32], num_mel_bins: int) -> NDArray[np.float32]:
    """Features float32 [F, num_mel_bins] of samples [N]: frames that end within the samples."""
    count = (len(samples) - 1) // _HOP
    padded = np.pad(samples, (_FRAME // 2, 0))  # the first frame is centered at the beginning
    window, filters = np.hanning(_FRAME + 1)[:-1].astype(np.float32), _filters(num_mel_bins)
    found = np.empty((count, num_mel_bins), np.float32)
    for begin in range(0, count, _BLOCK):
        end = min(begin + _BLOCK, count)
        some = padded[begin * _HOP : (end - 1) * _HOP + _FRAME]
        frames = np.lib.stride_tricks.sliding_window_view(some, _FRAME)[::_HOP] * window
        found[begin:end] = np.log(np.abs(np.fft.rfft(frames, _FFT)) @ filters + _FLOOR)
    return found


@cache
def _filters(num_mel_bins: int) -> NDArray[np.float64]:
    """Triangular filters of HTK's mel scale with a height of 1, [frequencies, num_mel_bins]."""
    highest = SAMPLE_RATE / 2
    corners = _hz(np.linspace(0, 2595 * np.log10(1 + highest / 700), num_mel_bins + 2))
    frequencies = np.linspace(0, highest, 1 + _FFT // 2)[:, None]
    widths = np.diff(corners)
    rising = (frequencies - corners[:-2]) / widths[:-1]
    falling = (corners[2:] - frequencies) / widths[1:]
    return np.maximum(0, np.minimum(rising, falling))


def _hz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    return 700 * (10 ** (mel / 2595) - 1)
