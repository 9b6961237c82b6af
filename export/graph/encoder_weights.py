"""Tensors of a checkpoint's encoders of images and audio, below any root."""

from __future__ import annotations

from types import ModuleType

from edgellm.core.errors import BrokenArtifactError
from edgellm.export.checkpoints.weights import Weights

_ROOTS = ("model", "")  # prefixes of parts in transformers 5 and older versions


def own_leftovers(weights: Weights, encoder: ModuleType) -> list[str]:
    """Unused tensors of an encoder; those of other networks do not count."""
    ours = tuple(
        f"{root}.{part}.".removeprefix(".") for root in _ROOTS for part in encoder.Model.parts
    )
    return [name for name in weights.unused() if name.startswith(ours)]


def encoder_weights(weights: Weights, parts: tuple[str, ...]) -> Weights:
    """The weights that contain an encoder's parts.

    Raises:
        BrokenArtifactError: the checkpoint has none of them.
    """
    names = weights.unused()
    for root in _ROOTS:
        found = weights / root if root else weights
        if any(name.startswith(f"{found.prefix}{parts[0]}.") for name in names):
            return found
    raise BrokenArtifactError(
        f"the checkpoint has no tensors below {parts[0]}",
        hint="give the folder of the whole model, with its encoders",
    )
