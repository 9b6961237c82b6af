"""Rotation of the residual stream by an orthogonal matrix: R1 of QuaRot (arXiv 2404.00456).

Each hidden state x [H] of the stream becomes x Q. The weights that read and write it are rotated,
and norms are folded into the layers that read them (`edgellm-quantize --rotate residual`).
config.json has Q, so that a draft for the original stream can be adapted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.checkpoint import Checkpoint, TensorInfo, TensorSource
from edgellm.export.checkpoints.weights import as_bytes

KEY = "edgellm_rotation"  # of config.json
_KIND = "hadamard"
_LARGEST_FACTOR = 64
_PIECE = 4096  # rows at a time
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16)}

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rotation:
    """Q [H, H]: random signs by seed, then `mixed`."""

    size: int
    seed: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Rotation | None:
        """The rotation from config.json; None: not rotated.

        Raises:
            UnsupportedModelError: another kind of rotation.
        """
        stated = config.get(KEY)
        if stated is None:
            return None
        if not isinstance(stated, dict) or stated.get("kind") != _KIND:
            raise UnsupportedModelError(f"config.json: {KEY} = {stated!r} is not understood")
        return cls(int(config["hidden_size"]), int(stated["seed"]))

    @property
    def described(self) -> dict[str, Any]:
        """The rotation as an entry of config.json."""
        return {"kind": _KIND, "seed": self.seed}

    def turn(self, x: F32) -> F32:
        """X Q for rows x [..., H]."""
        return mixed(x * self._signs)

    def back(self, x: F32) -> F32:
        """X Q^T for rows x [..., H]."""
        return mixed(x) * self._signs

    @property
    def _signs(self) -> F32:
        """Signs from a hash, which does not depend on library versions."""
        digest = hashlib.shake_256(f"{KEY} {self.seed}".encode()).digest(-(-self.size // 8))
        bits = np.unpackbits(np.frombuffer(digest, np.uint8))[: self.size]
        return 1 - 2 * bits.astype(np.float32)


def mixed(x: F32) -> F32:
    """Multiply rows x [..., n] by a symmetric orthogonal matrix [n, n], its own inverse.

    The matrix is Hadamard's for the power of two in n, times Hartley's for the odd rest.
    """
    width = x.shape[-1]
    found = np.ascontiguousarray(x, np.float32).reshape(-1, width)
    for size in _factors(width):
        parts = (found.reshape(-1, size) @ _factor(size)).reshape(len(found), -1, size)
        found = np.ascontiguousarray(parts.swapaxes(1, 2)).reshape(-1, width)
    return found.reshape(x.shape)


def _factors(width: int) -> list[int]:
    power = width & -width
    found = [width // power] if width > power else []
    while power > 1:
        found.append(min(power, _LARGEST_FACTOR))
        power //= found[-1]
    return found


def _factor(size: int) -> F32:
    """A symmetric orthogonal matrix [size, size]."""
    if size % 2:
        angles = 2 * np.pi / size * np.outer(np.arange(size), np.arange(size))
        return ((np.cos(angles) + np.sin(angles)) / np.sqrt(size)).astype(np.float32)
    found = np.ones((1, 1))
    while len(found) < size:
        found = np.block([[found, found], [found, -found]])
    return (found / np.sqrt(size)).astype(np.float32)


def rotation_name(config: Mapping[str, Any]) -> str:
    """The rotation's name for manifests, which must match between base and draft; "": none.

    Raises:
        UnsupportedModelError: as `Rotation.of`.
    """
    found = Rotation.of(config)
    return "" if found is None else f"{_KIND} {found.seed}"


def refuse_rotated(checkpoint: Checkpoint, wish: str) -> None:
    """Raise `UnsupportedModelError` for features that need the original stream."""
    if KEY in checkpoint.config:
        raise UnsupportedModelError(
            f"{wish}: the residual stream of {checkpoint.label} was rotated",
            hint="quantize the float model without --rotate residual",
        )


@dataclass(frozen=True, slots=True)
class Recipe:
    """A tensor that is computed at each read."""

    info: TensorInfo  # F32 or F16
    pieces: Callable[[], Iterable[F32]]  # of rows, in order


class Computed:
    """See `TensorSource`: a source with some computed tensors."""

    def __init__(self, source: TensorSource, recipes: Mapping[str, Recipe]) -> None:
        """`recipes`: by names of the source or new ones."""
        self._source, self._recipes = source, recipes
        own = {name: recipe.info for name, recipe in recipes.items()}
        self._infos = {**source.infos(), **own}

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        return self._infos

    def stream(self, name: str) -> Iterator[memoryview]:
        """Data in pieces.

        Raises:
            UnsupportedModelError: values out of the type's range.
        """
        recipe = self._recipes.get(name)
        if recipe is None:
            yield from self._source.stream(name)
            return
        dtype = _DTYPES[recipe.info.dtype]
        for piece in recipe.pieces():
            if np.abs(piece).max(initial=0) > np.finfo(dtype).max:
                raise UnsupportedModelError(
                    f"{name}: values beyond float16 when it is rotated",
                    hint="leave out --rotate, or give the model in float32",
                )
            yield as_bytes(piece.astype(dtype))


def turned_dtype(dtype: str) -> str:
    """Type of rotated values: float16 for 16-bit types, since rotation removes outliers."""
    return "F32" if dtype == "F32" else "F16"


def row_pieces(rows: F32, turn: Callable[[F32], F32]) -> Iterator[F32]:
    """`turn` applied to [..., n], some rows at a time."""
    flat = rows.reshape(-1, rows.shape[-1])
    for begin in range(0, len(flat), _PIECE):
        yield turn(flat[begin : begin + _PIECE])
