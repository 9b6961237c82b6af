"""LoRA adapters in slots on a GPU: their matrices, and the masks that select them by token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.errors import LimitError


@dataclass(frozen=True, slots=True)
class _Product:
    """LoRA matrices of layers with concatenated weights."""

    layers: tuple[tuple[int, int], ...]  # indices in `ADAPTER_TABLE`, and widths
    rank: int  # of a layer
    in_features: int

    def matrices(
        self, weights: NDArray[np.float32], table: NDArray[np.int64], places: int, dtype: np.dtype
    ) -> Iterator[tuple[str, NDArray[Any]]]:
        """Matrices by name, see `graph_io.adapter_matrix`."""
        rows, width = self.rank * len(self.layers), sum(width for _, width in self.layers)
        down = np.zeros((places, rows, self.in_features), dtype)
        up = np.zeros((places, rows, width), dtype)
        for place, entries in enumerate(table[1:]):
            column = 0
            for at, (layer, own) in enumerate(self.layers):
                rank, a, b = entries[layer].tolist()
                first, end = at * self.rank, column + own
                size = rank, self.in_features
                down[place, first : first + rank] = weights[a : a + math.prod(size)].reshape(size)
                own_up = weights[b : b + rank * own].reshape(rank, own)
                up[place, first : first + rank, column:end] = own_up
                column = end
        for part, matrix in ((graph_io.ADAPTER_DOWN, down), (graph_io.ADAPTER_UP, up)):
            yield graph_io.adapter_matrix(part, self.layers), matrix.reshape(places * rows, -1)


class AdapterPlaces:
    """The adapter slots of an engine."""

    def __init__(self, tensors: Mapping[str, tuple[Sequence[int], Any]], count: int) -> None:
        """Args: shapes and types of the inputs, with all columns, and the number of slots."""
        self.shapes = {
            name: (int(shape[0]), int(shape[1]))
            for name, (shape, _) in tensors.items()
            if name.startswith((graph_io.ADAPTER_DOWN, graph_io.ADAPTER_UP))
        }
        """Shapes of the matrices by name."""
        self.dtype, self._count = np.dtype(tensors[next(iter(self.shapes))][1]), count
        self._products = [
            _product(name, shape, count)
            for name, shape in self.shapes.items()
            if name.startswith(graph_io.ADAPTER_DOWN)
        ]
        ranks = {len(each.layers): each.rank * len(each.layers) for each in self._products}
        # By names of masks: the adapter of each column
        self._columns = {
            f"{graph_io.ADAPTER_MASK}{at}": 1 + np.arange(count * rank) // rank
            for at, rank in ranks.items()
        }

    @property
    def masks(self) -> dict[str, int]:
        """Number of columns by name of mask."""
        return {name: len(columns) for name, columns in self._columns.items()}

    def matrices(
        self, weights: NDArray[np.float32], table: NDArray[np.int64]
    ) -> Iterator[tuple[str, NDArray[Any]]]:
        """The contents of all matrices by name, one at a time.

        Raises:
            LimitError: a number exceeds the dtype; raised before the first matrix.
        """
        largest, maximum = float(np.abs(weights).max(initial=0)), float(np.finfo(self.dtype).max)
        if largest > maximum:
            raise LimitError(
                f"an adapter has numbers up to {largest:.3g}, with its scale; {self.dtype} ends "
                f"at {maximum:.3g}",
                hint="build from a bundle of float32: edgellm-export llm --dtype fp32",
            )
        return (
            found
            for product in self._products
            for found in product.matrices(weights, table, self._count, self.dtype)
        )

    def masks_of(self, adapters: NDArray[np.int64]) -> dict[str, NDArray[np.bool_]]:
        """Masks of tokens by name: `ADAPTER_MASK` for adapters [B, S], 0: none."""
        return {name: adapters[..., None] == places for name, places in self._columns.items()}


def _product(name: str, shape: tuple[int, int], places: int) -> _Product:
    """The product of a matrix's name and shape."""
    parts = name.removeprefix(graph_io.ADAPTER_DOWN).split("+")
    layers = tuple(
        (int(place), int(width)) for place, _, width in (p.partition("x") for p in parts)
    )
    return _Product(layers, shape[0] // places // len(layers), shape[1])
