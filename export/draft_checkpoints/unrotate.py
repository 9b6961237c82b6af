"""Adapts a draft to a base with a rotated residual stream, by rotating its weights.

This is exact and costs nothing: hidden states x Q of a base are inputs of fc, which absorbs Q. T
taps, H hidden size of the base, D of the draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.checkpoint import Checkpoint, TensorSource
from edgellm.export.checkpoints.lora_merge import floats
from edgellm.export.checkpoints.residual_rotation import (
    F32,
    KEY,
    Computed,
    Recipe,
    Rotation,
    row_pieces,
    turned_dtype,
)
from edgellm.export.draft_checkpoints.config import DraftConfig
from edgellm.export.draft_checkpoints.peagle_masks import FEATURE

_EMBEDDING, _HEAD, _FC = "embed_tokens.weight", "lm_head.weight", "fc.weight"
_FLOATS = "F32", "F16", "BF16"
_HINT = "quantize the base without --rotate residual"


def missing_rotation(base: Checkpoint, draft: Checkpoint) -> Rotation | None:
    """The base's rotation since the draft was trained.

    Raises:
        UnsupportedModelError: the draft was trained with another rotation.
    """
    found, known = Rotation.of(base.config), draft.config.get(KEY)
    if known is not None and found != Rotation.of({**base.config, KEY: known}):
        raise UnsupportedModelError(
            f"{draft.label} was trained with a base whose residual stream was rotated otherwise",
            hint="give that base as --base_model_dir",
        )
    return found if known is None else None


def facing(
    tensors: TensorSource, draft: Checkpoint, config: DraftConfig, rotation: Rotation
) -> TensorSource:
    """A draft's tensors, adapted to a rotated base.

    Args:
        tensors: of the draft, shared ones included.
        draft: its checkpoint.
        config: its facts.
        rotation: of the base since the draft was trained.

    Raises:
        UnsupportedModelError: no float matrix can absorb the rotation.
    """
    own, infos = draft.tensors.infos(), tensors.infos()
    if not config.fuses:
        _refuse("it reads the output of the final norm, which became part of the base's head")
    if infos[_FC].dtype not in _FLOATS:
        _refuse("its fc is quantized")
    has_tied = config.decoder.tie_word_embeddings and _EMBEDDING in own
    if not has_tied and not any(name.startswith("lm_head.") for name in own):
        _refuse("it borrows the base's head, which was changed with the final norm")
    fc = replace(infos[_FC], dtype="F32")
    recipes = {_FC: Recipe(fc, lambda: _fc(tensors, config, rotation))}
    if _EMBEDDING not in own:
        info = infos[_EMBEDDING]
        recipes[_EMBEDDING] = Recipe(
            replace(info, dtype=turned_dtype(info.dtype)),
            lambda: row_pieces(floats(tensors, _EMBEDDING), rotation.back),
        )
    if config.mask_rows is not None:
        info = replace(infos[FEATURE], dtype="F32")
        recipes[FEATURE] = Recipe(info, lambda: _rotated_taps(floats(tensors, FEATURE), rotation))
    for name in _norms_before_fc(config):
        ones = np.ones(infos[name].shape, np.float32)
        recipes[name] = Recipe(replace(infos[name], dtype="F32"), lambda ones=ones: [ones])
    return Computed(tensors, recipes)


def _fc(tensors: TensorSource, config: DraftConfig, rotation: Rotation) -> Iterator[F32]:
    """The fc [D, T*H] for rotated hidden states, with the norm before it folded in."""
    weight = floats(tensors, _FC)
    norms = [floats(tensors, name) for name in _norms_before_fc(config)]
    yield from _rotated_taps(weight * np.concatenate(norms) if norms else weight, rotation)


def _rotated_taps(rows: F32, rotation: Rotation) -> Iterator[F32]:
    """Rotate each tap of [..., T*H]."""
    taps = rows.reshape(*rows.shape[:-1], -1, rotation.size)
    yield rotation.turn(taps).reshape(rows.shape)


def _norms_before_fc(config: DraftConfig) -> list[str]:
    if config.norms.before_fc:
        return ["input_norm.weight"]
    count = len(config.hidden_taps) if config.norms.fc_norm else 0
    return [f"fc_norm.{index}.weight" for index in range(count)]


def _refuse(reason: str) -> None:
    raise UnsupportedModelError(
        f"the base's residual stream is rotated, and the draft cannot follow: {reason}", hint=_HINT
    )
