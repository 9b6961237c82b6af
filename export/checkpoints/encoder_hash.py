"""Hash of a checkpoint's encoder of images or audio: it matches two networks that use one encoder.

It ignores names and the other weights: a re-saved or quantized checkpoint, or a fine-tune with a
frozen encoder, has the hash of its source. So has Distil-Whisper that of its teacher.
"""

from __future__ import annotations

import hashlib

import numpy as np

from edgellm.export.checkpoints.checkpoint import Checkpoint
from edgellm.export.checkpoints.vlm import is_vlm, takes_audio, text_tower
from edgellm.export.checkpoints.weights import ONNX_TYPES

_SAMPLE_BYTES = 1 << 12  # of each tensor; training changes every part of one
_SAMPLE_VALUES = 1 << 10
_SPEECH = "model.encoder."  # prefix of tensors


def encoder_hash(checkpoint: Checkpoint) -> dict[str, str]:
    """The hash as an entry of a bundle's provenance; {} without an encoder."""
    names = checkpoint.tensors.infos().keys()
    if is_vlm(checkpoint) or takes_audio(checkpoint):
        tower = text_tower(checkpoint)
        text = {tower.stored_name(name) for name in tower.checkpoint.tensors.infos()}
        parts = sorted(_sample(checkpoint, name) for name in names - text)
    else:
        parts = sorted(_halves(checkpoint, name) for name in names if name.startswith(_SPEECH))
        if not parts:
            return {}
    return {"encoder_sha256": hashlib.sha256(b"".join(parts)).hexdigest()}


def _sample(checkpoint: Checkpoint, name: str) -> bytes:
    shape = checkpoint.tensors.infos()[name].shape
    return _hashed(shape, _first_piece(checkpoint, name)[:_SAMPLE_BYTES])


def _halves(checkpoint: Checkpoint, name: str) -> bytes:
    """As `_sample`, of values in float16: a draft's checkpoint may have less precision."""
    info = checkpoint.tensors.infos()[name]
    dtype = ONNX_TYPES[info.dtype].numpy()
    stored = _first_piece(checkpoint, name)[: _SAMPLE_VALUES * dtype.itemsize]
    with np.errstate(over="ignore"):
        return _hashed(info.shape, np.frombuffer(stored, dtype).astype(np.float16).tobytes())


def _first_piece(checkpoint: Checkpoint, name: str) -> bytes:
    return bytes(next(checkpoint.tensors.stream(name), memoryview(b"")))


def _hashed(shape: tuple[int, ...], sample: bytes) -> bytes:
    return hashlib.sha256(repr(shape).encode() + sample).digest()
