"""A residual stream that was turned by an orthogonal matrix: R1 of QuaRot (arXiv 2404.00456).

Every state x [H] of the stream has become x Q; the weights that read and write it were turned with
it, and norms folded into what reads them (`edgellm-quantize --rotate residual`). config.json says
by which Q, so that a draft, which reads the stream as it was, can be fitted to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.hf import Checkpoint, TensorInfo, TensorSource
from edgellm.export.checkpoints.weights import as_bytes

KEY = "edgellm_rotation"  # of config.json
_KIND = "hadamard"
_LARGEST_FACTOR = 64
_PIECE = 4096  # rows at a time
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16)}

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rotation:
    """Q [H, H]: signs that a seed draws, then `mixed`."""

    size: int
    seed: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Rotation | None:
        """What config.json says; None: the stream is as it was trained.

        Raises:
            UnsupportedModelError: another kind of rotation.
        """
        said = config.get(KEY)
        if said is None:
            return None
        if not isinstance(said, dict) or said.get("kind") != _KIND:
            raise UnsupportedModelError(f"config.json: {KEY} = {said!r} is not understood")
        return cls(int(config["hidden_size"]), int(said["seed"]))

    @property
    def described(self) -> dict[str, Any]:
        """For config.json."""
        return {"kind": _KIND, "seed": self.seed}

    def turn(self, x: F32) -> F32:
        """X Q for rows x [..., H]."""
        return mixed(x * self._signs)

    def back(self, x: F32) -> F32:
        """X Q^T for rows x [..., H]."""
        return mixed(x) * self._signs

    @property
    def _signs(self) -> F32:
        """Of a hash, which is the same in every version of every library."""
        digest = hashlib.shake_256(f"{KEY} {self.seed}".encode()).digest(-(-self.size // 8))
        bits = np.unpackbits(np.frombuffer(digest, np.uint8))[: self.size]
        return 1 - 2 * bits.astype(np.float32)


def mixed(x: F32) -> F32:
    """Rows x [..., n] by a symmetric orthogonal matrix [n, n]; twice gives x again.

    The matrix is Hadamard's for the power of two in n, by Hartley's for the odd rest.
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
    """Symmetric and orthogonal [size, size]."""
    if size % 2:
        angles = 2 * np.pi / size * np.outer(np.arange(size), np.arange(size))
        return ((np.cos(angles) + np.sin(angles)) / np.sqrt(size)).astype(np.float32)
    found = np.ones((1, 1))
    while len(found) < size:
        found = np.block([[found, found], [found, -found]])
    return (found / np.sqrt(size)).astype(np.float32)


def rotation_name(config: Mapping[str, Any]) -> str:
    """What a manifest says, so that only a draft of the same stream is attached; "": no rotation.

    Raises:
        UnsupportedModelError: as `Rotation.of`.
    """
    found = Rotation.of(config)
    return "" if found is None else f"{_KIND} {found.seed}"


def refuse_rotated(checkpoint: Checkpoint, wish: str) -> None:
    """Raise `UnsupportedModelError` if something is wanted that reads the stream as it was."""
    if KEY in checkpoint.config:
        raise UnsupportedModelError(
            f"{wish}: the residual stream of {checkpoint.label} was rotated",
            hint="quantize the float model without --rotate residual",
        )


@dataclass(frozen=True, slots=True)
class Recipe:
    """A tensor that is computed whenever it is read."""

    info: TensorInfo  # F32 or F16
    pieces: Callable[[], Iterable[F32]]  # of rows, in order


class Computed:
    """See `TensorSource`: a source, of which some tensors are computed."""

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
            UnsupportedModelError: values that its type cannot hold.
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
    """What holds turned values: float16 for those of 16 bits, whose outliers are gone."""
    return "F32" if dtype == "F32" else "F16"


def row_pieces(rows: F32, turn: Callable[[F32], F32]) -> Iterator[F32]:
    """`turn` of [..., n], some rows at a time."""
    flat = rows.reshape(-1, rows.shape[-1])
    for begin in range(0, len(flat), _PIECE):
        yield turn(flat[begin : begin + _PIECE])
