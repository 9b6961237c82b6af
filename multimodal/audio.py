"""Decodes audio files to mono samples at 16 kHz, through PyAV, and raw PCM."""

from __future__ import annotations

import importlib
import importlib.util
import io
import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgellm.core.commands.extras import install
from edgellm.core.errors import RequestError
from edgellm.multimodal.media import open_container
from edgellm.multimodal.source_files import read_source

SAMPLE_RATE = 16000  # Hz
RAW_SUFFIXES = (".pcm", ".raw")  # of files of 16-bit integers, little endian, mono, at that rate
_FULL_SCALE = 32768  # of 16-bit samples
_AUDIBLE = 1e-4  # largest sample of silence with the noise of 16 bits, of 1
_LONGEST_NAME = 4096  # characters of a path
_FORMATS = "WAV, FLAC, MP3, M4A or OGG"


def read_audio(path: Path) -> NDArray[np.float32]:
    """Mono samples at `SAMPLE_RATE`, float32 [N] from -1 to 1.

    Raises:
        RequestError: missing, no audio, damaged, silent, or PyAV is not installed.
    """
    if not path.is_file():
        fault = "is not a regular file" if path.exists() else "does not exist"
        raise RequestError(f"{path} {fault}", hint=f"give an audio file: {_FORMATS}")
    if path.suffix.lower() in RAW_SUFFIXES:
        return _checked(_raw(path), str(path))
    with path.open("rb") as file:
        return decode_audio(file, str(path))


def open_audio(source: str, folder: Path) -> NDArray[np.float32]:
    """As `read_audio`, for a path relative to `folder` or a URI; the clip may be silent."""
    name, data = read_source(source, folder, "recording")
    if Path(source[:_LONGEST_NAME]).suffix.lower() in RAW_SUFFIXES:
        _require_even(len(data), name)
        return _whole(raw_samples(data), name)
    return _whole(_decoded(io.BytesIO(data), name, math.inf), name)


def decode_audio(file: BinaryIO, name: str, max_seconds: float = math.inf) -> NDArray[np.float32]:
    """As `read_audio`, for an open file that can be searched.

    Args:
        file: a small one may decode to hours.
        name: in errors.
        max_seconds: longer audio raises `RequestError`.
    """
    return _checked(_decoded(file, name, max_seconds), name)


def _checked(samples: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    """The samples, if they are audible numbers."""
    if np.abs(_whole(samples, name)).max() < _AUDIBLE:
        raise RequestError(
            f"{name} is silent: all of its {len(samples) / SAMPLE_RATE:.1f} s",
            hint="check the microphone, or the channel that was recorded",
        )
    return samples


def _whole(samples: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    """The samples, if they are numbers."""
    if not len(samples):
        raise RequestError(f"{name} has no audio samples", hint="record or copy the file again")
    if not np.isfinite(samples).all():
        raise RequestError(
            f"{name} has samples that are no numbers", hint=f"save it again as {_FORMATS}"
        )
    return samples


def _raw(path: Path) -> NDArray[np.float32]:
    _require_even(path.stat().st_size, str(path))
    return raw_samples(path.read_bytes())


def _require_even(num_bytes: int, name: str) -> None:
    if num_bytes % 2:
        raise RequestError(
            f"{name} has {num_bytes} bytes, which are no 16-bit samples",
            hint="raw audio is 16-bit integers, little endian, mono, at 16 kHz; save it as WAV",
        )


def raw_samples(content: bytes) -> NDArray[np.float32]:
    """Samples of 16-bit integers, little endian."""
    return np.frombuffer(content, "<i2").astype(np.float32) * np.float32(1 / _FULL_SCALE)


def _decoded(file: BinaryIO, name: str, max_seconds: float) -> NDArray[np.float32]:
    if importlib.util.find_spec("av") is None:
        raise RequestError(
            "audio files need PyAV",
            hint=f"{install('audio')}; or give raw audio, 16-bit mono at 16 kHz, as FILE.pcm",
        )
    av: Any = importlib.import_module("av")  # an optional package
    parts: list[NDArray[np.float32]] = []
    try:
        with open_container(av, file) as container:
            if not container.streams.audio:
                raise RequestError(
                    f"{name} holds no audio", hint=f"give a file with sound: {_FORMATS}"
                )
            left = max_seconds * SAMPLE_RATE
            for part in _samples(av, container):
                parts.append(part)
                left -= len(part)
                if left < 0:
                    raise RequestError(
                        f"{name} has more than {max_seconds:g} s of audio",
                        hint="cut it into shorter ones",
                    )
    except (av.FFmpegError, OSError, ValueError) as error:
        seconds = sum(map(len, parts)) / SAMPLE_RATE
        place = f"is damaged after {seconds:.1f} s" if parts else "holds no audio that can be read"
        reason = getattr(error, "strerror", None) or error
        raise RequestError(
            f"{name} {place}: {reason}", hint=f"copy the file again, or save it as {_FORMATS}"
        ) from None
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _samples(av: Any, container: Any) -> Iterator[NDArray[np.float32]]:
    """Pieces of the first audio stream, resampled; mono is the mean of the channels.

    FFmpeg's own mix of float samples exceeds 1.
    """
    resampler = av.AudioResampler(format="fltp", rate=SAMPLE_RATE)
    for frame in chain(container.decode(container.streams.audio[0]), (None,)):
        for piece in resampler.resample(frame):
            yield piece.to_ndarray().mean(axis=0)
