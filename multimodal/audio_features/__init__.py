"""Features of audio clips for encoders of chat models, one file for each `model_type`.

A file exports `prepare(samples, spec)`: mono samples at 16 kHz, float32 [N], N at least
`AudioEncoderSpec.min_samples`, to a `Clip`; and `shapes(spec)` of the inputs that it makes.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from edgellm.core.model_spec import AudioEncoderSpec
from edgellm.multimodal.audio import SAMPLE_RATE
from edgellm.multimodal.audio_features.clip import Clip

__all__ = ["Clip", "prepare", "shapes", "silence", "sizes"]


def prepare(samples: NDArray[np.float32], spec: AudioEncoderSpec) -> Clip:
    """Inputs of an encoder's graph for a clip, float32 [N] at 16 kHz, of any length."""
    missing = max(spec.min_samples - len(samples), 0)
    return _family(spec).prepare(np.pad(samples, (0, missing)), spec)


def shapes(spec: AudioEncoderSpec) -> dict[str, list[int | str]]:
    """Shapes of the graph's inputs by contract name; sizes that vary have names."""
    return _family(spec).shapes(spec)


def silence(spec: AudioEncoderSpec, seconds: float) -> Clip:
    """A silent clip of this length, or of the least one."""
    return prepare(np.zeros(int(seconds * SAMPLE_RATE), np.float32), spec)


def sizes(spec: AudioEncoderSpec, clip: Clip) -> dict[str, int]:
    """Sizes of a clip's inputs by their names."""
    return {
        name: actual
        for key, shape in shapes(spec).items()
        for name, actual in zip(shape, clip.inputs[key].shape, strict=True)
        if isinstance(name, str)
    }


def _family(spec: AudioEncoderSpec) -> ModuleType:
    return importlib.import_module(f"{__name__}.{spec.model_type}")
