"""Hash of a checkpoint's visual and audio encoders: it matches a language model and an encoder.

It ignores names and the language model's weights: a re-saved or quantized checkpoint, or a
fine-tune with a frozen encoder, has the hash of its source.
"""

from __future__ import annotations

import hashlib

from edgellm.export.checkpoints.checkpoint import Checkpoint
from edgellm.export.checkpoints.vlm import is_vlm, takes_audio, text_tower

_SAMPLE_BYTES = 1 << 12  # of each tensor; training changes every part of one


def encoder_hash(checkpoint: Checkpoint) -> dict[str, str]:
    """The hash as an entry of a bundle's provenance; {} without an encoder."""
    if not is_vlm(checkpoint) and not takes_audio(checkpoint):
        return {}
    tower = text_tower(checkpoint)
    text = {tower.stored_name(name) for name in tower.checkpoint.tensors.infos()}
    parts = sorted(_sample(checkpoint, name) for name in checkpoint.tensors.infos().keys() - text)
    return {"encoder_sha256": hashlib.sha256(b"".join(parts)).hexdigest()}


def _sample(checkpoint: Checkpoint, name: str) -> bytes:
    shape = checkpoint.tensors.infos()[name].shape
    piece = next(checkpoint.tensors.stream(name), memoryview(b""))
    return hashlib.sha256(repr(shape).encode() + bytes(piece[:_SAMPLE_BYTES])).digest()
