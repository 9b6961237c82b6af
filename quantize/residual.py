"""A model whose residual stream is turned by an orthogonal matrix (R1 of arXiv 2404.00456).

Exact in floats: norms without weights commute with the turning, so their weights first become part
of what reads them. Channels with outliers, in weights and in what layers read, are then alike.
H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from edgellm.contract import UnsupportedModelError
from edgellm.export.checkpoint import TensorInfo, TensorSource
from edgellm.export.rotation import (
    F32,
    KEY,
    Computed,
    Recipe,
    Rotation,
    turned_dtype,
)
from edgellm.quantize.checks import EMBEDDING, HEAD, NORM
from edgellm.quantize.subject import LanguageModel
from edgellm.quantize.tensors import read_tensor

_HINT = "choose --rotate values, or leave --rotate out"
_BEFORE, _BEHIND = "input_layernorm.weight", "post_attention_layernorm.weight"
_WRITERS = ("o_proj", "down_proj", "w2", "output_linear")  # their outputs are added to the stream
_PIECE = 4096  # rows at a time
_INNER = ("q_b_proj", "kv_b_proj")  # read what a layer has made itself


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
    whole, is_tied = model.whole, model.head_name == EMBEDDING
    rotation = Rotation(model.config.hidden_size, seed)
    recipes = _recipes(whole.tensors, rotation, model.layers, is_tied=is_tied)
    config = {
        **whole.config,
        "tie_word_embeddings": False,
        KEY: {**rotation.described, "untied": is_tied},
    }
    tensors = Computed(whole.tensors, recipes)
    turned = replace(whole, config=config, tensors=tensors, blocks=None)
    return LanguageModel.of(turned, ignored_keys)


def rotates(model: LanguageModel) -> bool:
    """Whether `rotated` takes it."""
    try:
        _recipes(model.whole.tensors, Rotation(1, 0), model.layers, is_tied=False)
    except UnsupportedModelError:
        return False
    return True


def _recipes(
    source: TensorSource, rotation: Rotation, layers: tuple[str, ...], *, is_tied: bool
) -> dict[str, Recipe]:
    infos, final = source.infos(), f"{NORM}weight"
    others = {name for name in infos if not name.startswith(layers)}
    if left := sorted(others - {EMBEDDING, HEAD, final}):
        raise UnsupportedModelError(f"--rotate: nothing is known of {left[0]}", hint=_HINT)
    found = {
        EMBEDDING: _reading(source, EMBEDDING, None, rotation),
        HEAD: _reading(source, EMBEDDING if is_tied else HEAD, final, rotation),
        final: _ones(infos[final]),
    }
    for layer in layers:
        own = {name for name in infos if name.startswith(layer)}
        _check_norms(infos, layer, own)
        found |= {layer + norm: _ones(infos[layer + norm]) for norm in (_BEFORE, _BEHIND)}
        for name in own - found.keys():
            recipe = _recipe(source, layer, name, rotation)
            found |= {} if recipe is None else {name: recipe}
    return found


def _recipe(source: TensorSource, layer: str, name: str, rotation: Rotation) -> Recipe | None:
    """Of a layer's tensor; None: it stays as it is."""
    module, _, part = name.removeprefix(layer).rpartition(".")
    own, is_vector = module.rpartition(".")[2], len(source.infos()[name].shape) == 1
    if own in _WRITERS:
        return _writing(source, name, rotation)
    if is_vector or part != "weight" or own in _INNER:
        return None
    norm = _BEFORE if module.startswith("self_attn.") else _BEHIND
    return _reading(source, name, layer + norm, rotation)


def _check_norms(infos: Mapping[str, TensorInfo], layer: str, own: set[str]) -> None:
    """Raise `UnsupportedModelError` unless a layer reads the stream through two plain norms."""
    locals_ = (name.removeprefix(layer) for name in own if len(infos[name].shape) == 1)
    norms = {name for name in locals_ if name.count(".") == 1}
    if other := sorted(norms ^ {_BEFORE, _BEHIND}):
        has = "has" if layer + other[0] in infos else "lacks"
        raise UnsupportedModelError(
            f"--rotate: {layer.removesuffix('.')} {has} {other[0]}: only layers of two norms "
            "without biases, before attention and before the MLP, compute the same when rotated",
            hint=_HINT,
        )


def _reading(source: TensorSource, name: str, norm: str | None, rotation: Rotation) -> Recipe:
    """A matrix [..., H] of what is multiplied with the stream, and the norm that it takes up."""

    def pieces() -> Iterable[F32]:
        folded = np.float32(1) if norm is None else read_tensor(source, norm).floats()
        stored = read_tensor(source, name)
        for begin in range(0, stored.info.shape[0], _PIECE):
            yield rotation.turn(stored.rows(begin, begin + _PIECE).floats() * folded)

    return _turned(source, name, pieces)


def _writing(source: TensorSource, name: str, rotation: Rotation) -> Recipe:
    """A matrix [..., H, K] or a bias [H] of what is added to the stream."""

    def pieces() -> Iterable[F32]:
        values = read_tensor(source, name).floats()
        if values.ndim == 1:
            return [rotation.turn(values)]
        return [rotation.turn(values.swapaxes(-1, -2)).swapaxes(-1, -2)]

    return _turned(source, name, pieces)


def _turned(source: TensorSource, name: str, pieces: Callable[[], Iterable[F32]]) -> Recipe:
    info = source.infos()[name]
    return Recipe(replace(info, dtype=turned_dtype(info.dtype)), pieces)


def _ones(info: TensorInfo) -> Recipe:
    """A norm whose weight others have taken up."""
    dtype = turned_dtype(info.dtype)
    return Recipe(replace(info, dtype=dtype), lambda: [np.ones(info.shape, np.float32)])
