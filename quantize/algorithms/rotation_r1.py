"""A model whose residual stream is turned by an orthogonal matrix (R1 of arXiv 2404.00456).

Exact in floats: norms without weights commute with the turning, so their weights first become part
of what reads them. Channels with outliers, in weights and in what layers read, are then alike.
H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.hf import TensorInfo, TensorSource
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
_ROWS = ("self_attn.", "mamba.", "conv.", "linear_attn.")  # what reads the first norm
# Their outputs are added to the stream.
_WRITERS = ("o_proj", "out_proj", "down_proj", "w2", "output_linear", "fc2_latent_proj")
_PIECE = 4096  # rows at a time
_INNER = ("q_b_proj", "kv_b_proj", "conv1d", "conv")  # read what a layer has made itself
_LATENT, _EXPERTS = "fc1_latent_proj.weight", ".experts."  # experts that read what this made


def rotated(model: LanguageModel, seed: int, ignored_keys: tuple[str, ...]) -> LanguageModel:
    """The same model with another residual stream; config.json says by which rotation.

    An embedding that is the head becomes two matrices.

    Args:
        model: of floats.
        seed: draws the rotation.
        ignored_keys: config keys known not to matter.

    Raises:
        UnsupportedModelError: it has norms with a bias, or of what a layer adds, which do not
            commute with the rotation, or more than a language model.
    """
    whole, is_tied = model.whole, model.head_name != HEAD
    rotation = Rotation(model.config.hidden_size, seed)
    config = {
        **untied(whole.config),
        KEY: {**rotation.described, "untied": is_tied},
    }
    tensors = Computed(whole.tensors, _recipes(model, rotation))
    turned = replace(whole, config=config, tensors=tensors, blocks=None)
    return LanguageModel.of(turned, ignored_keys)


def rotates(model: LanguageModel) -> bool:
    """Whether `rotated` takes it."""
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
        raise UnsupportedModelError(f"--rotate: nothing is known of {left[0]}", hint=_HINT)
    turning = _Turning(source, rotation, family)
    of_head = embedding if model.head_name != HEAD else head
    found = {
        embedding: turning.reading(embedding, None),
        head: turning.reading(of_head, final),
        final: turning.ones(final),
    }
    for layer in layers:
        own = {name for name in infos if name.startswith(layer)}
        _check_norms(infos, layer, own, family)
        found |= {
            f"{layer}{norm}.weight": turning.ones(f"{layer}{norm}.weight") for norm in family.norms
        }
        for name in own - found.keys():
            recipe = _recipe(turning, layer, name, own)
            found |= {} if recipe is None else {name: recipe}
    return found


def _recipe(turning: _Turning, layer: str, name: str, own: set[str]) -> Recipe | None:
    """Of a layer's tensor; None: it stays as it is."""
    module, _, part = name.removeprefix(layer).rpartition(".")
    if _EXPERTS in name and any(each.endswith(_LATENT) for each in own):
        return None
    last, is_vector = module.rpartition(".")[2], len(turning.source.infos()[name].shape) == 1
    if last in _WRITERS:
        return turning.writing(name)
    if is_vector or part != "weight" or last in _INNER:
        return None
    norms = turning.family.norms
    norm = norms[0] if module.startswith(_ROWS) else norms[-1]
    return turning.reading(name, f"{layer}{norm}.weight")


def _check_norms(
    infos: Mapping[str, TensorInfo], layer: str, own: set[str], family: Family
) -> None:
    """Raise `UnsupportedModelError` unless a layer reads the stream through plain norms alone."""
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
            f"--rotate: {layer.removesuffix('.')} {has} {other[0]}: only layers of norms "
            "without biases, before attention and before the MLP, compute the same when rotated",
            hint=_HINT,
        )


@dataclass(frozen=True, slots=True)
class _Turning:
    """Makes the recipes of a checkpoint's tensors."""

    source: TensorSource
    rotation: Rotation
    family: Family

    def reading(self, name: str, norm: str | None) -> Recipe:
        """A matrix [..., H] that is multiplied with the stream, and the norm that it takes up."""
        shift = np.float32(self.family.norm_shift)

        def pieces() -> Iterable[F32]:
            folded = (
                np.float32(1) if norm is None else read_tensor(self.source, norm).floats() + shift
            )
            stored = read_tensor(self.source, name)
            for begin in range(0, stored.info.shape[0], _PIECE):
                rows = stored.rows(begin, begin + _PIECE).floats()
                yield self.rotation.turn(rows * folded)

        return self._turned(name, pieces)

    def writing(self, name: str) -> Recipe:
        """A matrix [..., H, K] or a bias [H] of what is added to the stream."""

        def pieces() -> Iterable[F32]:
            values, turn = read_tensor(self.source, name).floats(), self.rotation.turn
            if values.ndim == 1:
                return [turn(values)]
            return [turn(values.swapaxes(-1, -2)).swapaxes(-1, -2)]

        return self._turned(name, pieces)

    def ones(self, name: str) -> Recipe:
        """A norm whose weight others have taken up."""
        info = self.source.infos()[name]
        left = 1 - self.family.norm_shift
        return Recipe(
            replace(info, dtype=turned_dtype(info.dtype)),
            lambda: [np.full(info.shape, left, np.float32)],
        )

    def _turned(self, name: str, pieces: Callable[[], Iterable[F32]]) -> Recipe:
        info = self.source.infos()[name]
        return Recipe(replace(info, dtype=turned_dtype(info.dtype)), pieces)
