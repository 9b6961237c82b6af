"""Weights by address: matrices in a file of their own, which the runtime loads with the plan.

The file begins with the table of `kernels/triton/weights.py`, whose addresses are offsets in the
file, and the places of its matrices (`cuda/weight_table.py`); each tensor follows at a multiple of
`ALIGNMENT`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.block_factors import Joined
from edgellm.build.lowering.linears.weights import WeightPart
from edgellm.core import graph_io
from edgellm.core.onnx_functions import SHIFTED_LINEAR
from edgellm.device_runtime.kernels.triton.catalog import FIRST_FP8, WIDTH_STEP
from edgellm.device_runtime.runners.tensorrt.cuda.weight_table import (
    ADDRESSES,
    HEADER,
    MAGIC,
    PLACE,
    table_entries,
)
from edgellm.device_runtime.runners.tensorrt.packed_buffers import aligned

_CODES = {"dense": "fp16", "int4": "int4", "int8": "int8", "fp4": "fp4", "fp8": "fp8"}
_BITS = {"fp16": 16, "int4": 4, "int8": 8, "fp4": 4, "fp8": 8}
_MIDDLES = {"int4": 8, "int8": 128}  # of unsigned codes
_FACTOR_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredForm:
    """Stored form of a matrix."""

    codes: str  # as kernels name them
    block: int  # inputs that share a scale
    is_shifted: bool  # whether blocks have shifts besides scales

    @classmethod
    def of(cls, part: WeightPart) -> StoredForm:
        """The form that keeps a weight's values."""
        has_points = part.is_unsigned or part.has_minima or part.operation == SHIFTED_LINEAR
        return cls(
            codes=_CODES[part.kind],
            block=part.block_size or part.shape[0],
            is_shifted=part.kind in _MIDDLES and has_points,
        )

    def fault(self, what: str, widths: Iterable[int], sm: int) -> str:
        """Why there are no kernels for such matrices on a GPU; "" if there are.

        Args:
            what: they are.
            widths: inputs, and further sizes that are multiples of the same.
            sm: compute capability of the GPU.
        """
        if self.codes == "fp8" and sm < FIRST_FP8:
            return f"{what} in FP8 from compute capability {FIRST_FP8 / 10} on, not for {sm / 10}"
        if odd := [size for size in (*widths, self.block) if size % WIDTH_STEP]:
            return f"{what} with widths and groups of a multiple of {WIDTH_STEP}, not of {odd[0]}"
        return ""

    def num_bytes(self, count: int) -> int:
        """Bytes of `count` weights."""
        factors = 0 if self.codes == "fp16" else 1 + self.is_shifted
        return count * _BITS[self.codes] // 8 + factors * _FACTOR_BYTES * count // self.block


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Weights [out, in], or [E, out, in] of experts, which may have biases."""

    parts: Callable[[], Iterable[WeightPart]]  # all outputs in order; they are stored alike
    bias: np.ndarray | None = None  # [out] or [E, out]
    twin: int | None = None  # the matrix that has these weights; None: they are its own


class AddressedWeights:
    """Matrices that a graph's kernels know by address."""

    def __init__(self, graph: GraphEditor) -> None:
        """`graph`: gets the table as an input when a matrix is added."""
        self._graph, self._matrices = graph, list[Matrix]()
        self._known: dict[Hashable, int] = {}
        self._table: ir.Value | None = None

    def __len__(self) -> int:
        return len(self._matrices)

    def add(self, matrix: Matrix) -> int:
        """The index of a further matrix."""
        self._matrices.append(matrix)
        self.table.shape = ir.Shape([table_entries(len(self))])
        return len(self) - 1

    def add_once(self, key: Hashable, matrix: Matrix) -> int:
        """The index of the matrix of this key, which is added the first time."""
        if key not in self._known:
            self._known[key] = self.add(matrix)
        return self._known[key]

    @property
    def table(self) -> ir.Value:
        """The graph's input with the addresses."""
        if self._table is None:
            self._table = self._graph.input(graph_io.WEIGHT_TABLE, ir.DataType.INT64, [0])
        return self._table

    def write(self, path: Path) -> None:
        """Write all matrices; no file if there are none."""
        if not self._matrices:
            return
        count = len(self)
        table, places = np.zeros(table_entries(count), np.int64), np.zeros(count, PLACE)
        table[:HEADER] = count, count ^ MAGIC
        offsets = table[HEADER:].reshape(count, ADDRESSES)
        with path.open("wb") as stream:
            stream.write(bytes(table.nbytes + places.nbytes))
            for matrix, own, place in zip(self._matrices, offsets, places, strict=True):
                place["first"] = _align(stream)
                digest = hashlib.sha256()
                tensors = [] if matrix.twin is not None else _tensors(matrix)
                for at, pieces in (*enumerate(tensors), (3, _biases(matrix.bias))):
                    own[at] = _append(stream, digest.update, pieces)
                place["end"], place["digest"] = stream.tell(), list(digest.digest())
            for matrix, own in zip(self._matrices, offsets, strict=True):
                if matrix.twin is not None:
                    own[:3] = offsets[matrix.twin][:3]
            stream.seek(0)
            stream.write(table.tobytes() + places.tobytes())


def _align(stream: BinaryIO) -> int:
    """Fill up to the next multiple of `ALIGNMENT`; its offset."""
    stream.write(bytes(aligned(stream.tell()) - stream.tell()))
    return stream.tell()


def _append(
    stream: BinaryIO, update: Callable[[memoryview], None], pieces: Iterator[np.ndarray] | None
) -> int:
    """Write a tensor and update its digest; returns its offset, 0 if there is none."""
    if pieces is None:
        return 0
    offset = _align(stream)
    for piece in pieces:
        data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
        stream.write(data)
        update(data)
    return offset


def _biases(bias: np.ndarray | None) -> Iterator[np.ndarray] | None:
    return None if bias is None else iter([bias.astype(np.float16)])


def _tensors(matrix: Matrix) -> Iterator[Iterator[np.ndarray] | None]:
    """Weights, scales and shifts of a matrix; None: there are none."""
    form = StoredForm.of(next(iter(matrix.parts())))

    def of_each(make: Callable[[WeightPart], np.ndarray]) -> Iterator[np.ndarray]:
        return (make(part) for part in matrix.parts())

    def factors(part: WeightPart, found: np.ndarray) -> np.ndarray:
        """[out, blocks] of [blocks, out], or of fewer that all share."""
        shape = part.shape[0] // form.block, part.shape[1]
        return np.broadcast_to(found, shape).T.astype(np.float16)

    def shifts(part: WeightPart) -> np.ndarray:
        return factors(part, -part.offsets(middle_of(part)))

    yield of_each(lambda part: _stored(part, form))
    yield None if form.codes == "fp16" else of_each(lambda part: factors(part, part.scales()))
    yield of_each(shifts) if form.is_shifted else None


def middle_of(part: WeightPart) -> int:
    """What integer codes are counted from; their products in float16 should be small."""
    codes = part.stored[0]
    if not part.is_unsigned:
        return 0
    if part.kind == "int8" and isinstance(codes, Joined):
        return 1 << (codes.form.bits - 1)
    return _MIDDLES[part.kind]


def _stored(part: WeightPart, form: StoredForm) -> np.ndarray:
    """Weights or codes [out, ...], as kernels read them."""
    if form.codes == "fp16":
        return part.dense().T.astype(np.float16)
    if form.codes == "fp4":
        return _pairs(part.nibbles())
    codes = part.codes().T  # [out, in]
    if form.codes == "fp8":
        return codes.astype(part.stored[0].dtype.numpy())
    stored = codes + part.repeated(part.zero_points()).T - np.int16(middle_of(part))
    return _pairs((stored + 8).astype(np.uint8)) if form.codes == "int4" else stored.astype(np.int8)


def _pairs(codes: np.ndarray) -> np.ndarray:
    """4-bit codes [out, in] as bytes [out, in / 2], the first in the lower half."""
    return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
