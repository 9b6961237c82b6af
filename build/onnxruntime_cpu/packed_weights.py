"""Weights of a portable graph as edgellm's kernels read them, see `device_runtime.kernels.pack`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.build.lowering.linear_weights import (
    LinearWeight,
    WeightPart,
    blocks_of_int8,
    rows_of_int8,
)
from edgellm.build.lowering.round_int4 import BLOCK_SIZE as INT4_BLOCK
from edgellm.build.lowering.round_int4 import expert_block, nearest_int4_rows
from edgellm.build.lowering.weights import U8, stored_bytes, stored_rows
from edgellm.device_runtime.kernels.pack import (
    BLOCKS,
    PackedForm,
    channel_slices,
    pack_codes,
    pack_floats,
    pack_fp8,
    records,
    scale_multiplier,
)

_HALVES = {ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}
_ROUNDED_BLOCK = 32  # of weights that become int8 only here
_Order = NDArray[np.int64]


def form_of(
    weight: LinearWeight,
    *,
    rounds: str = "",
    is_gated: bool = False,
    input_terms: int = 1,
    of_expert: bool = False,
) -> PackedForm | None:
    """How the kernels keep a weight; None: floats of 32 bits, which they do not.

    FP8, NVFP4, and integers whose blocks are multiples of 16, keep their codes; other blocks become
    int8 in blocks of 32. `rounds`: what floats become, "int8" or "int4", whose inputs then have
    `input_terms`; FP8 follows to "int8", with one. `of_expert`: of a mixture, whose floats of 32
    bits are packed, too.
    """
    shape = weight.in_features, sum(weight.widths)
    block = _int4_block(shape[0], of_expert=of_expert)
    if rounds == "int4" and weight.kind == "dense" and block:
        return PackedForm("int4", *shape, block, is_gated=is_gated)
    if weight.kind == "dense" and rounds != "int8":
        kind = float_kind(weight.parts[0].stored[0].dtype)
        is_left = kind == "float32" and not of_expert
        return None if is_left else PackedForm(kind, *shape, is_gated=is_gated)
    block = _block(weight.parts[0])
    if not keeps_codes(weight, rounds):
        terms = input_terms if weight.kind == "dense" else 1
        return PackedForm("int8", *shape, _ROUNDED_BLOCK, is_gated=is_gated, input_terms=terms)
    has_zero_points = any(part.is_unsigned for part in weight.parts)
    return PackedForm(weight.kind, *shape, block, has_zero_points, is_gated)


def _int4_block(width: int, *, of_expert: bool) -> int:
    return expert_block(width) if of_expert else INT4_BLOCK * (width % INT4_BLOCK == 0)


def float_kind(dtype: ir.DataType) -> str:
    """The kind of a packed weight of floats."""
    return _HALVES.get(dtype, "float32")


def keeps_codes(weight: LinearWeight, rounds: str = "") -> bool:
    """Whether a packed weight has the checkpoint's codes; `rounds` as in `form_of`."""
    if weight.kind == "fp8" and rounds == "int8":
        return False
    return all(_block(part) for part in weight.parts)


def _block(part: WeightPart) -> int:
    """Inputs that share a packed scale; 0: the codes cannot stay."""
    if part.kind == "fp8":
        return part.block_size or part.shape[0]
    if part.kind not in ("int4", "int8", "fp4"):
        return 0
    if part.block_size:
        return next((size for size in BLOCKS[::-1] if part.block_size % size == 0), 0)
    return next((size for size in (128, 64) if part.shape[0] % size == 0), 32)


def packed_bytes(
    form: PackedForm, weight: LinearWeight, order: _Order | None = None
) -> Iterator[bytes]:
    """The packed weight, piece by piece; `order` of the output channels, None: as they are."""
    if form.is_quantized and weight.kind == "dense":
        yield from _rounded(form, weight, order)
        return
    if form.kind == "int4" and all(_is_sliceable(part, form) for part in weight.parts):
        yield from _rounded_before(form, weight, order)
        return
    if not form.is_quantized:
        rows = _joined([_floats(part, form) for part in weight.parts], order)
        yield from pack_floats(form, rows)
        return
    if form.kind == "fp8":
        codes = _joined([_bytes_of_fp8(part) for part in weight.parts], order)
        scales = _joined([_spread(part.scales(), part, form).T for part in weight.parts], order)
        yield from pack_fp8(form, codes, scales)
        return
    parts = [_codes(part, form) for part in weight.parts]
    codes, scales = (_joined([part[at] for part in parts], order) for at in (0, 1))
    offsets = _joined([part[2] for part in parts], order) if form.has_zero_points else None
    del parts
    yield from pack_codes(form, codes, scales, offsets=offsets)


def _rounded(form: PackedForm, weight: LinearWeight, order: _Order | None) -> Iterator[bytes]:
    """Of floats, some channels at a time: a weight is never held whole."""
    order = np.arange(form.out_features) if order is None else order
    largest = 127 if form.kind == "int8" else 7

    def top(part: slice) -> float:
        return float(np.abs(_some_rows(weight, order[part])).max())

    def packed(part: slice) -> bytes:
        rows = _some_rows(weight, order[part])
        if form.kind == "int8":
            codes, scales = rows_of_int8(rows, form.block)
            codes = codes[:, : form.in_features]
        else:
            codes, scales = nearest_int4_rows(rows, form.block)
        unsigned = (codes + np.int16(largest + 1)).astype(np.uint8)
        return records(form, unsigned, scales, None, multiplier)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        multiplier = scale_multiplier(max(threads.map(top, channel_slices(form))) / largest)
        yield form.header(multiplier)
        yield from threads.map(packed, channel_slices(form))


def _is_sliceable(part: WeightPart, form: PackedForm) -> bool:
    """Whether some columns of its codes [in, out] can be read alone, and packed as they are."""
    is_stored = isinstance(part.stored[0], ir.ExternalTensor) and not part.is_unsigned
    return (
        is_stored
        and not part.is_by_output
        and part.block_size == form.block
        and part.shape[1] % 2 == 0
    )


def _rounded_before(
    form: PackedForm, weight: LinearWeight, order: _Order | None
) -> Iterator[bytes]:
    """Of INT4 codes that the build has rounded, some channels at a time, as `_rounded`."""
    scales = _joined([part.scales().T for part in weight.parts], order)
    order = np.arange(form.out_features) if order is None else order
    multiplier = scale_multiplier(float(np.abs(scales).max()))

    def packed(part: slice) -> bytes:
        return records(form, _some_codes(weight, order[part]), scales[part], None, multiplier)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        yield form.header(multiplier)
        yield from threads.map(packed, channel_slices(form))


def _some_codes(weight: LinearWeight, order: _Order) -> U8:
    """Output channels of INT4 codes, in that order: 0 to 15, [len(order), in]."""
    found, begin = np.empty((len(order), weight.in_features), np.uint8), 0
    for part, width in zip(weight.parts, weight.widths, strict=True):
        places = np.flatnonzero((order >= begin) & (order < begin + width))
        if len(places):
            own = order[places] - begin
            first, end = int(own.min()) // 2, int(own.max()) // 2 + 1
            tensor = part.stored[0]
            assert isinstance(tensor, ir.ExternalTensor)
            shape = part.shape[0], width // 2
            pairs = np.memmap(tensor.path, np.uint8, "r", tensor.offset or 0, shape)[:, first:end].T
            nibbles = np.stack([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=1)
            nibbles = nibbles.reshape(-1, weight.in_features) ^ np.uint8(8)
            found[places] = nibbles[own - 2 * first]
        begin += width
    return found


def _some_rows(weight: LinearWeight, order: _Order) -> NDArray[np.float32]:
    """Output channels of a dense weight, in that order: float32 [len(order), in]."""
    found, begin = np.empty((len(order), weight.in_features), np.float32), 0
    for part, width in zip(weight.parts, weight.widths, strict=True):
        places = np.flatnonzero((order >= begin) & (order < begin + width))
        if len(places):
            own = order[places] - begin
            first, end = int(own.min()), int(own.max()) + 1
            found[places] = stored_rows(part.stored[0], first, end)[own - first]
        begin += width
    return found


def _joined(parts: list[np.ndarray], order: _Order | None) -> np.ndarray:
    rows = np.concatenate(parts) if len(parts) > 1 else parts[0]
    return rows if order is None else rows[order]


def _floats(part: WeightPart, form: PackedForm) -> np.ndarray:
    """[out, in] as it is stored, in bits."""
    bits = np.uint32 if form.kind == "float32" else np.uint16
    return stored_bytes(part.stored[0]).view(bits).reshape(part.shape[::-1])


def _bytes_of_fp8(part: WeightPart) -> U8:
    """Codes [out, in] as they are stored."""
    return stored_bytes(part.stored[0]).reshape(part.shape).T


def _codes(part: WeightPart, form: PackedForm) -> tuple[U8, np.ndarray, np.ndarray]:
    """Codes [out, in], scales and offsets [out, blocks], see `pack_codes`."""
    none = np.zeros((part.shape[1], form.blocks), np.float32)
    if form.kind == "fp4":
        return part.nibbles(), _spread(part.scales(), part, form).T, none
    middle = 8 if form.kind == "int4" else 128
    if not _block(part) or part.kind == "fp8":
        codes, scales = blocks_of_int8(part.dense(), form.block)
        return _columns(codes[: part.shape[0]] + np.int16(middle)), scales.T, none
    codes, scales = part.codes(), _spread(part.scales(), part, form).T
    if not part.is_unsigned:
        return _columns(codes + np.int16(middle)), scales, none
    codes = codes + part.repeated(part.zero_points())
    # Codes of fewer bits than they are kept in count from their own middle: offsets stay small.
    own = (int(codes.max()) + 1) // 2 if part.has_minima else middle
    offsets = _spread(part.offsets(own), part, form).T
    return _columns(codes + np.int16(middle - own)), scales, offsets


def _spread(per_block: np.ndarray, part: WeightPart, form: PackedForm) -> np.ndarray:
    """One row for each block of the form."""
    repeats = part.block_size // form.block if part.block_size else 1
    return np.broadcast_to(np.repeat(per_block, repeats, 0), (form.blocks, part.shape[1]))


def _columns(array: np.ndarray) -> U8:
    """[in, out] as uint8 [out, in]."""
    return np.ascontiguousarray(array.T.astype(np.uint8))
