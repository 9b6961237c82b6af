"""Settings of feature extractors, and config readers that audio encoders share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.config.reader import REMEDY, ConfigReader

FRAMES_PER_S = 100
# What Whisper's log-mel features are computed by; see `edgellm.multimodal.log_mel`
LOG_MEL = {"sampling_rate": 16000, "n_fft": 400, "hop_length": 160, "dither": 0.0}
_OF_AUDIO = {*LOG_MEL, "feature_size", "chunk_length"}  # keys that settings of images lack
_FILES = ("preprocessor_config.json", "processor_config.json")


def extractor_settings(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Settings of a checkpoint's feature extractor; {} without its file.

    `files`: processor files by name.
    """
    for name in _FILES:
        values: dict[str, Any] = json.loads(files.get(name, b"{}"))
        found = values.get("feature_extractor") or values
        if not _OF_AUDIO.isdisjoint(found):
            return found
    return {}


def expect_settings(settings: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Accept settings only if they are absent or as wanted.

    Raises:
        UnsupportedModelError: another value.
    """
    for key, value in wanted.items():
        if settings.get(key, value) != value:
            shown = f"{value:g}" if isinstance(value, float) else value
            raise UnsupportedModelError(
                f"preprocessor_config.json: {key} {settings[key]!r} is not supported, only {shown}",
                hint="use preprocessor_config.json and config.json as the model was published",
            )


def heads_of(audio: ConfigReader, key: str, size: int, default: int) -> int:
    """The number of heads, which divides the width `size`.

    Raises:
        UnsupportedModelError: it does not.
    """
    heads = audio.positive(key, default)
    if size % heads:
        raise UnsupportedModelError(
            f"config.json: {key} {heads} does not divide a width of {size}", hint=REMEDY
        )
    return heads
