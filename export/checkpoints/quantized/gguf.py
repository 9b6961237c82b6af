"""GGUF: blocks of codes with a scale, some with a minimum; both may be quantized.

Sources: the package gguf; for Q1_0 and Q2_0 ggml's `ggml-quants.c`. A weight is
`code * scale + minimum` in float32, as there, so dequantized values are bit-identical. Codes of
linear layers are INT4 where that has all values. Others are in planes (`PackedCodes`), as are those
of embeddings, for lookups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.core.errors import BrokenArtifactError
from edgellm.core.onnx_functions import PackedCodes
from edgellm.export.checkpoints.quantized_weight import (
    BlockFactors,
    BlockWeight,
    StoredPlanes,
    pair_nibbles,
)
from edgellm.export.checkpoints.weights import StoredTensor, Weights, as_bytes

U8 = np.ndarray  # uint8; numpy's stubs make signed numbers of shifted ones
_SHIFTS = np.array([0, 2, 4, 6], np.uint8)[:, None]
MXFP4 = "MXFP4"  # experts only, see `export.checkpoints.experts.stacked`
_TABLE = "embed_tokens."  # suffix of embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A format of blocks; its readers take whole ones, uint8 [n, bytes].

    Attributes:
        num_bytes: of a whole block.
        values: of a whole block.
        shared: inputs that share a scale.
        bits: of a code.
        is_signed: half of the range is subtracted from a code; 8 bits are INT8.
        codes: returns the codes, uint8 [n, values].
        scale: offset of the float16 scale.
        minimum: offset of the float16 minimum or its factor, -1: none.
        by_table: codes stand for IQ4's values.
        factors: returns the codes of scales and minima, int8 [2 or 1, n, values / shared].
        is_negated: the scale's sign changes, since codes of -1 to 2 are stored as those of 1 to -2.
    """

    num_bytes: int
    values: int
    shared: int
    bits: int
    is_signed: bool
    codes: Callable[[U8], U8]
    scale: int = 0
    minimum: int = -1
    by_table: bool = False
    factors: Callable[[U8], np.ndarray] | None = None
    is_negated: bool = False

    @property
    def packed(self) -> PackedCodes:
        """Its format in planes."""
        return PackedCodes(self.bits, self.is_signed, self.by_table)


def read(weights: Weights, shape: tuple[int, ...], dtype: ir.DataType) -> BlockWeight | None:
    """See `edgellm.export.checkpoints.quantized.Layout`; scales keep the file's float16.

    Also for several weights in one tensor [..., out, in].

    Raises (when the tensors are written):
        BrokenArtifactError: a scale or minimum is NaN.
    """
    del dtype
    info = weights.info("weight")
    form = FORMS.get(info.dtype) if info is not None else None
    if form is None:
        return None
    name, blocks = f"{weights.prefix}weight", weights.blocks("weight", shape, form.num_bytes)

    def tensor(
        suffix: str, kind: ir.DataType, per_block: int, make: Callable[[U8], np.ndarray]
    ) -> StoredTensor:
        """A tensor with this number of values for each block."""
        columns = shape[-1] // form.values * per_block

        def stream() -> Iterator[memoryview]:
            for rows in blocks():
                yield as_bytes(make(rows))

        return StoredTensor(
            name=f"{name}{suffix}", dtype=kind, shape=(*shape[:-1], columns), stream=stream
        )

    def halves(suffix: str, place: int) -> StoredTensor:
        make = partial(_halves, name, form, place)
        return tensor(suffix, ir.DataType.FLOAT16, 1, make)

    def factors(suffix: str, place: int, index: int) -> BlockFactors:
        if form.factors is None:
            return BlockFactors(halves(suffix, place))
        find, count = form.factors, form.values // form.shared
        values = tensor(suffix, ir.DataType.INT8, count, lambda rows: find(rows)[index])
        return BlockFactors(values, halves(f"{suffix}_factor", place), count)

    def codes() -> StoredTensor | StoredPlanes:
        kind = _code_type(form, is_table=weights.prefix.endswith(_TABLE))
        if kind is not None:
            return tensor("", kind, form.values, lambda rows: _whole(form, kind, rows))
        found, first = [], 0
        for bits, suffix in zip(form.packed.planes, ("", "_high"), strict=False):
            make = partial(_plane, form, first, bits)
            found.append(tensor(suffix, ir.DataType.UINT8, form.values * bits // 8, make))
            first += bits
        return StoredPlanes(form.packed, tuple(found))

    return BlockWeight(
        codes=codes(),
        block_size=form.shared,
        scales=factors("_scale", form.scale, 0),
        minima=None if form.minimum < 0 else factors("_minimum", form.minimum, 1),
        input_order=_input_order(weights, shape[-1]),
    )


def _input_order(weights: Weights, width: int) -> np.ndarray | None:
    """Permutation of the columns by a converter, see `export.checkpoints.gguf.permutations`."""
    if weights.info("input_order") is None:
        return None
    return weights.array("input_order", (width,), "I64")()


def _code_type(form: Form, *, is_table: bool) -> ir.DataType | None:
    """The type of whole codes; None: they are in planes."""
    if form.bits == 8:
        return ir.DataType.INT8
    if form.bits != 4 or form.by_table or is_table:  # ONNX has no lookup of 4-bit types
        return None
    return ir.DataType.INT4 if form.is_signed else ir.DataType.UINT4


def _whole(form: Form, kind: ir.DataType, rows: U8) -> np.ndarray:
    codes = form.codes(rows)
    if kind.bitwidth != 4:
        return codes
    return pair_nibbles(codes ^ np.uint8(8) if form.is_signed else codes)  # minus 8, in 4 bits


def _plane(form: Form, first: int, bits: int, rows: U8) -> U8:
    """Bits of all codes from `first`, of 8, 4 or 2 neighbours in a byte."""
    parts = (form.codes(rows) >> np.uint8(first)) & np.uint8((1 << bits) - 1)
    parts = parts.reshape(len(rows), -1, 8 // bits)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return np.bitwise_or.reduce(parts << shifts, -1)


def _halves(name: str, form: Form, place: int, rows: U8) -> np.ndarray:
    halves = np.ascontiguousarray(rows[:, place : place + 2]).view(np.float16)
    if not np.isfinite(halves).all():
        raise BrokenArtifactError(
            f"tensor {name} has a scale that is not a number",
            hint="the file is damaged, or was made of weights that were; fetch it again",
        )
    return -halves if form.is_negated else halves


# Codes, each uint8 [n, values].


def _nibbles(rows: U8, begin: int, group: int) -> U8:
    """Nibbles of bytes from `begin`, `group` at a time: the low halves, then the high ones."""
    packed = rows[:, begin:].reshape(len(rows), -1, 1, group)
    return np.concatenate([packed & 15, packed >> 4], 2).reshape(len(rows), -1)


def _pairs_of_bits(rows: U8, begin: int, end: int) -> U8:
    """Two bits of 32 bytes at a time, the lowest first."""
    packed = rows[:, begin:end].reshape(len(rows), -1, 1, 32)
    return (packed >> _SHIFTS & 3).reshape(len(rows), -1)


def _bits(rows: U8, begin: int) -> U8:
    """Bit i of byte b, of 32 bytes, belongs to value 32 i + b: [n, 256]."""
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    return (rows[:, None, begin : begin + 32] >> shifts & 1).reshape(len(rows), 256)


def _q5(rows: U8, begin: int) -> U8:
    """Q5: highest bits of 32 values in four bytes, lowest bit first, then the nibbles."""
    high = np.unpackbits(rows[:, begin : begin + 4], axis=1, bitorder="little")
    return _nibbles(rows, begin + 4, 16) | high << np.uint8(4)


def _around(codes: U8, middle: int) -> NDArray[np.int8]:
    return (codes - np.uint8(middle)).view(np.int8)  # wraps: two's complement


def _q6(rows: U8) -> U8:
    return _nibbles(rows[:, :128], 0, 64) | _pairs_of_bits(rows, 128, 192) << 4


def _q3(rows: U8) -> U8:
    return _pairs_of_bits(rows, 32, 96) | _bits(rows, 0) << 2


def _ternary(rows: U8) -> U8:
    """TQ1_0: five values of base 3 in a byte, as a fraction of 256; four in each of the last."""
    return 3 - np.concatenate(
        [_digits(rows[:, :32], 5), _digits(rows[:, 32:48], 5), _digits(rows[:, 48:52], 4)], axis=1
    )


def _digits(packed: U8, count: int) -> U8:
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
    fractions = (packed[:, None] * powers).astype(np.uint16)  # of 256: whole parts are dropped
    return (fractions * 3 >> 8).astype(np.uint8).reshape(len(packed), -1)


def _neighbours(rows: U8, begin: int) -> U8:
    """Two bits of four neighbours in a byte, the lowest first."""
    return (rows[:, begin:, None] >> _SHIFTS[:, 0] & 3).reshape(len(rows), -1)


def _signs(rows: U8) -> U8:
    """Q1_0: a bit for a scale's sign, as codes of -1 and 1."""
    return 1 + 2 * np.unpackbits(rows[:, 2:], axis=1, bitorder="little")


# Codes of scales and minima, [2 or 1, n, values / shared].


def _q2_factors(rows: U8) -> np.ndarray:
    both = rows[:, :16]
    return np.stack([both & 15, -(both >> 4).view(np.int8)]).astype(np.int8)


def _q3_factors(rows: U8) -> np.ndarray:
    low = np.concatenate([rows[:, 96:104] & 15, rows[:, 96:104] >> 4], 1)
    high = (rows[:, None, 104:108] >> _SHIFTS & 3).reshape(len(rows), 16)
    return _around(low | high << 4, 32)[None]


def _k_factors(rows: U8) -> np.ndarray:
    """Scales and minima of Q4_K and Q5_K: six bits each, split for the last four blocks."""
    scales, minima, last = (rows[:, begin : begin + 4] for begin in (4, 8, 12))
    scales = np.concatenate([scales & 63, last & 15 | scales >> 6 << 4], 1)
    minima = np.concatenate([minima & 63, last >> 4 | minima >> 6 << 4], 1)
    return np.stack([scales.view(np.int8), -minima.view(np.int8)])


def _iq4_factors(rows: U8) -> np.ndarray:
    low = np.stack([rows[:, 4:8] & 15, rows[:, 4:8] >> 4], 2).reshape(len(rows), 8)
    high = (rows[:, 2:4, None] >> _SHIFTS[:, 0] & 3).reshape(len(rows), 8)
    return _around(low | high << 4, 32)[None]


FORMS = {
    "Q4_0": Form(
        num_bytes=18,
        values=32,
        shared=32,
        bits=4,
        is_signed=True,
        codes=lambda rows: _nibbles(rows, 2, 16),
    ),
    "Q4_1": Form(
        num_bytes=20,
        values=32,
        shared=32,
        bits=4,
        is_signed=False,
        codes=lambda rows: _nibbles(rows, 4, 16),
        minimum=2,
    ),
    "Q5_0": Form(
        num_bytes=22,
        values=32,
        shared=32,
        bits=5,
        is_signed=True,
        codes=lambda rows: _q5(rows, 2),
    ),
    "Q5_1": Form(
        num_bytes=24,
        values=32,
        shared=32,
        bits=5,
        is_signed=False,
        codes=lambda rows: _q5(rows, 4),
        minimum=2,
    ),
    "Q8_0": Form(
        num_bytes=34,
        values=32,
        shared=32,
        bits=8,
        is_signed=True,
        codes=lambda rows: rows[:, 2:],
    ),
    "Q2_K": Form(
        num_bytes=84,
        values=256,
        shared=16,
        bits=2,
        is_signed=False,
        codes=lambda rows: _pairs_of_bits(rows, 16, 80),
        scale=80,
        minimum=82,
        factors=_q2_factors,
    ),
    "Q3_K": Form(
        num_bytes=110,
        values=256,
        shared=16,
        bits=3,
        is_signed=True,
        codes=_q3,
        scale=108,
        factors=_q3_factors,
    ),
    "Q4_K": Form(
        num_bytes=144,
        values=256,
        shared=32,
        bits=4,
        is_signed=False,
        codes=lambda rows: _nibbles(rows, 16, 32),
        scale=0,
        minimum=2,
        factors=_k_factors,
    ),
    "Q5_K": Form(
        num_bytes=176,
        values=256,
        shared=32,
        bits=5,
        is_signed=False,
        codes=lambda rows: _nibbles(rows, 48, 32) | _bits(rows, 16) << 4,
        scale=0,
        minimum=2,
        factors=_k_factors,
    ),
    "Q6_K": Form(
        num_bytes=210,
        values=256,
        shared=16,
        bits=6,
        is_signed=True,
        codes=_q6,
        scale=208,
        factors=lambda rows: rows[None, :, 192:208].view(np.int8),
    ),
    "IQ4_NL": Form(
        num_bytes=18,
        values=32,
        shared=32,
        bits=4,
        is_signed=False,
        codes=lambda rows: _nibbles(rows, 2, 16),
        by_table=True,
    ),
    "IQ4_XS": Form(
        num_bytes=136,
        values=256,
        shared=32,
        bits=4,
        is_signed=False,
        codes=lambda rows: _nibbles(rows, 8, 16),
        by_table=True,
        factors=_iq4_factors,
    ),
    "TQ1_0": Form(
        num_bytes=54,
        values=256,
        shared=256,
        bits=2,
        is_signed=True,
        codes=_ternary,
        scale=52,
        is_negated=True,
    ),
    "TQ2_0": Form(
        num_bytes=66,
        values=256,
        shared=256,
        bits=2,
        is_signed=True,
        codes=lambda rows: 3 - _pairs_of_bits(rows, 0, 64),
        scale=64,
        is_negated=True,
    ),
    "Q1_0": Form(num_bytes=18, values=128, shared=128, bits=2, is_signed=True, codes=_signs),
    "Q2_0": Form(
        num_bytes=18,
        values=64,
        shared=64,
        bits=2,
        is_signed=True,
        codes=lambda rows: 3 - _neighbours(rows, 2),
        is_negated=True,
    ),
}
