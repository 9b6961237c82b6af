"""Log-mel features of audio as Whisper computes them (arXiv 2212.04356): a frame each 10 ms.

The mel scale and its filters are those of Slaney's Auditory Toolbox.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from edgellm.multimodal.audio import SAMPLE_RATE

HOP = 160  # samples between frames
FRAMES_PER_S = SAMPLE_RATE // HOP
_FFT = 400  # samples of a frame
_BLOCK = 512  # frames computed at once: 4 MB of each intermediate
_FLOOR = 1e-10  # of power, before its logarithm
_RANGE = 8.0  # decades below the loudest number of the audio
# The mel scale: linear up to 1 kHz, then logarithmic
_HZ_PER_MEL, _FIRST_LOG_HZ = 200 / 3, 1000.0
_FIRST_LOG_MEL, _LOG_STEP = _FIRST_LOG_HZ / _HZ_PER_MEL, np.log(6.4) / 27


def log_mel(samples: NDArray[np.float32], num_mel_bins: int) -> NDArray[np.float32]:
    """Features float32 [num_mel_bins, N // HOP] of samples [N], at least as long as a frame."""
    count, window = len(samples) // HOP, np.hanning(_FFT + 1)[:-1]  # periodic
    filters = mel_filters(num_mel_bins)
    found = np.empty((num_mel_bins, count), np.float32)
    for begin in range(0, count, _BLOCK):
        end = min(begin + _BLOCK, count)
        power = np.abs(np.fft.rfft(_frames(samples, begin, end) * window)) ** 2
        found[:, begin:end] = np.log10(np.maximum(power @ filters, _FLOOR)).T
    kept = np.maximum(found, found.max() - np.float32(_RANGE))
    return (kept + np.float32(4)) * np.float32(0.25)


def _frames(samples: NDArray[np.float32], begin: int, end: int) -> NDArray[np.float32]:
    """Samples around the centers of frames, [end - begin, _FFT]; both ends are mirrored."""
    first, last = begin * HOP - _FFT // 2, (end - 1) * HOP + _FFT // 2
    missing = max(-first, 0), max(last - len(samples), 0)
    some = np.pad(samples[max(first, 0) : last], missing, mode="reflect")
    return np.lib.stride_tricks.sliding_window_view(some, _FFT)[::HOP]


@cache
def mel_filters(num_mel_bins: int) -> NDArray[np.float64]:
    """Triangular filters of equal areas, [frequencies, num_mel_bins], from 0 to 8 kHz."""
    highest = SAMPLE_RATE / 2
    corners = _hz(np.linspace(0, _mel(highest), num_mel_bins + 2))
    frequencies = np.linspace(0, highest, 1 + _FFT // 2)[:, None]
    widths = np.diff(corners)
    rising = (frequencies - corners[:-2]) / widths[:-1]
    falling = (corners[2:] - frequencies) / widths[1:]
    heights = 2 / (corners[2:] - corners[:-2])
    return np.maximum(0, np.minimum(rising, falling)) * heights


def _mel(hz: float) -> float:
    """The mel value of a frequency above `_FIRST_LOG_HZ`."""
    return _FIRST_LOG_MEL + np.log(hz / _FIRST_LOG_HZ) / _LOG_STEP


def _hz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    above = _FIRST_LOG_HZ * np.exp(_LOG_STEP * (mel - _FIRST_LOG_MEL))
    return np.where(mel < _FIRST_LOG_MEL, mel * _HZ_PER_MEL, above)
