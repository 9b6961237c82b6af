"""Rotation of the residual stream by an orthogonal matrix (R1 of arXiv 2404.00456).

Exact in float: norms without weights commute with rotations, so their weights are first folded into
the linear layers after them. The rotation spreads outliers in weights and inputs over all channels.
H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.checkpoint import TensorInfo, TensorSource
from edgellm.export.checkpoints.residual_rotation import (
    F32,
    KEY,
    Computed,
    Recipe,
    Rotation,
    turned_dtype,
)
from edgellm.quantize.formats.tensors import read_tensor
from edgellm.quantize.models.checks import HEAD
from edgellm.quantize.models.families import Family
from edgellm.quantize.models.language_model import LanguageModel, untied

_HINT = "choose --rotate values, or leave --rotate out"
_MIXERS = ("self_attn.", "mamba.", "conv.", "linear_attn.")  # modules after the first norm
# Linear layers whose outputs are added to the residual stream
_WRITERS = ("o_proj", "out_proj", "down_proj", "w2", "output_linear", "fc2_latent_proj")
_CHUNK = 4096  # rows at a time
# Their input is not the residual stream
_INNER = (
    *("q_b_proj", "kv_b_proj", "f_b_proj", "g_b_proj"),
    *("conv1d", "q_conv1d", "k_conv1d", "v_conv1d", "conv"),
)
_LATENT, _EXPERTS = "fc1_latent_proj.weight", ".experts."  # experts with latent inputs


def rotated(model: LanguageModel, seed: int, ignored_keys: tuple[str, ...]) -> LanguageModel:
    """Rotate the residual stream of a model; its config.json names the rotation.

    A tied head is untied.

    Args:
        model: a float model.
        seed: of the rotation.
        ignored_keys: config keys to ignore.

    Raises:
        UnsupportedModelError: norms do not commute with the rotation (biases, post-norms), or
            there are tensors outside the language model.
    """
    whole, is_tied = model.whole, model.head_name != HEAD
    rotation = Rotation(model.config.hidden_size, seed)
    config = {
        **untied(whole.config),
        KEY: {**rotation.described, "untied": is_tied},
    }
    tensors = Computed(whole.tensors, _recipes(model, rotation))
    result = replace(whole, config=config, tensors=tensors, blocks=None)
    return LanguageModel.of(result, ignored_keys)


def rotates(model: LanguageModel) -> bool:
    """Return whether `rotated` supports a model."""
    try:
        _recipes(model, Rotation(1, 0))
    except UnsupportedModelError:
        return False
    return True


def _recipes(model: LanguageModel, rotation: Rotation) -> dict[str, Recipe]:
    source, family, infos = model.whole.tensors, model.family, model.whole.tensors.infos()
    layers = tuple(map(model.stored_name, model.layers))
    embedding, head, final = map(
        model.stored_name, (model.embedding_name, HEAD, f"model.{family.norm}.weight")
    )
    others = {name for name in infos if not name.startswith(layers)}
    if left := sorted(others - {embedding, head, final}):
        raise UnsupportedModelError(f"--rotate: unknown tensor {left[0]}", hint=_HINT)
    rotator = _Rotator(source, rotation, family)
    of_head = embedding if model.head_name != HEAD else head
    found = {
        embedding: rotator.reading(embedding, None),
        head: rotator.reading(of_head, final),
        final: rotator.ones(final),
    }
    for layer in layers:
        own = {name for name in infos if name.startswith(layer)}
        _check_norms(infos, layer, own, family)
        found |= {
            f"{layer}{norm}.weight": rotator.ones(f"{layer}{norm}.weight") for norm in family.norms
        }
        for name in own - found.keys():
            recipe = _recipe(rotator, layer, name, own)
            found |= {} if recipe is None else {name: recipe}
    return found


def _recipe(rotator: _Rotator, layer: str, name: str, own: set[str]) -> Recipe | None:
    """Return the recipe of a layer's tensor; None: unchanged."""
    module, _, part = name.removeprefix(layer).rpartition(".")
    if _EXPERTS in name and any(each.endswith(_LATENT) for each in own):
        return None
    last, is_vector = module.rpartition(".")[2], len(rotator.source.infos()[name].shape) == 1
    if last in _WRITERS:
        return rotator.writing(name)
    if is_vector or part != "weight" or last in _INNER:
        return None
    norms = rotator.family.norms
    norm = norms[0] if module.startswith(_MIXERS) else norms[-1]
    return rotator.reading(name, f"{layer}{norm}.weight")


def _check_norms(
    infos: Mapping[str, TensorInfo], layer: str, own: set[str], family: Family
) -> None:
    """Raise `UnsupportedModelError` unless plain norms precede all other parts of a layer."""
    norms = {
        name
        for each in own
        if (name := each.removeprefix(layer)).count(".") == 1
        and "norm" in name
        and len(infos[each].shape) == 1
    }
    if other := sorted(norms ^ {f"{norm}.weight" for norm in family.norms}):
        has = "has" if layer + other[0] in infos else "lacks"
        raise UnsupportedModelError(
            f"--rotate: {layer.removesuffix('.')} {has} {other[0]}: rotation supports only layers "
            "with norms without biases, before attention and before the MLP",
            hint=_HINT,
        )


@dataclass(frozen=True, slots=True)
class _Rotator:
    """Makes the recipes of a checkpoint's tensors."""

    source: TensorSource
    rotation: Rotation
    family: Family

    def reading(self, name: str, norm: str | None) -> Recipe:
        """Rotate a matrix [..., H] that reads the residual stream, with `norm` folded into it."""
        shift = np.float32(self.family.norm_shift)

        def chunks() -> Iterable[F32]:
            folded = (
                np.float32(1) if norm is None else read_tensor(self.source, norm).floats() + shift
            )
            stored = read_tensor(self.source, name)
            for begin in range(0, stored.info.shape[0], _CHUNK):
                rows = stored.rows(begin, begin + _CHUNK).floats()
                yield self.rotation.turn(rows * folded)

        return self._rotated(name, chunks)

    def writing(self, name: str) -> Recipe:
        """Rotate a matrix [..., H, K] or bias [H] whose output is added to the residual stream."""

        def chunks() -> Iterable[F32]:
            values, turn = read_tensor(self.source, name).floats(), self.rotation.turn
            if values.ndim == 1:
                return [turn(values)]
            return [turn(values.swapaxes(-1, -2)).swapaxes(-1, -2)]

        return self._rotated(name, chunks)

    def ones(self, name: str) -> Recipe:
        """Return the recipe of a norm whose weight is folded into others."""
        info = self.source.infos()[name]
        left = 1 - self.family.norm_shift
        return Recipe(
            replace(info, dtype=turned_dtype(info.dtype)),
            lambda: [np.full(info.shape, left, np.float32)],
        )

    def _rotated(self, name: str, chunks: Callable[[], Iterable[F32]]) -> Recipe:
        info = self.source.infos()[name]
        return Recipe(replace(info, dtype=turned_dtype(info.dtype)), chunks)
