"""Packs weights of a portable graph for edgellm's kernels, see `kernels/packed_layout.py`."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.build.lowering.linears.block_factors import Factors, Joined, stored_pairs
from edgellm.build.lowering.linears.round_int4 import BLOCK_SIZE as INT4_BLOCK
from edgellm.build.lowering.linears.round_int4 import expert_block, nearest_int4_rows
from edgellm.build.lowering.linears.weights import LinearWeight, WeightPart, rows_of_int8
from edgellm.build.lowering.weights import stored_array
from edgellm.device_runtime.kernels.packed_layout import (
    BLOCKS,
    MIDDLES,
    SPAN,
    PackedForm,
    QuantizedScales,
    block_records,
    channel_slices,
    float_records,
    fp8_records,
    largest_factor,
    records,
    scale_multiplier,
    words_of_codes,
    words_of_columns,
    words_of_pairs,
)

_HALVES = {ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}
_NIBBLES = ("int4", "fp4")  # forms of 4 bits
_ROUNDED_BLOCK = 32  # of weights that are requantized to int8 here
_SIGN, _SIGNS = 8, np.uint32(0x88888888)  # adding 8 to a 4-bit code changes its highest bit
_SCALED = {"int2": True, "int3": False, "int4": True, "int5": True, "int6": False}  # has minima
_Order = NDArray[np.int64]


def form_of(
    weight: LinearWeight,
    *,
    rounds: str = "",
    is_gated: bool = False,
    input_terms: int = 1,
    of_expert: bool = False,
) -> PackedForm | None:
    """Packed form of a weight; None: float32, which is not packed.

    FP8, NVFP4, and integers with blocks in multiples of 16, keep their codes; other blocks become
    int8 in blocks of 32. `rounds`: type of rounded floats, "int8" or "int4", with `input_terms` for
    inputs; FP8 becomes "int8", too, with one term. `of_expert`: a mixture's weight, packed even as
    float32.
    """
    form = partial(
        PackedForm,
        in_features=weight.in_features,
        out_features=sum(weight.widths),
        is_gated=is_gated,
    )
    block = _int4_block(weight.in_features, of_expert=of_expert)
    if rounds == "int4" and weight.kind == "dense" and block:
        return form(kind="int4", block=block)
    if weight.kind == "dense" and rounds != "int8":
        kind = float_kind(weight.parts[0].stored[0].dtype)
        is_left = kind == "float32" and not of_expert
        return None if is_left else form(kind=kind)
    block = _block(weight.parts[0])
    has_zero_points = any(part.is_unsigned for part in weight.parts)
    form = partial(form, block=block, has_zero_points=has_zero_points)
    stored = {storage(part) for part in weight.parts}  # of experts may differ
    if (found := stored.pop()) is not None and not stored:
        return form(kind=found[0], has_quantized_scales=found[1])
    if not keeps_codes(weight, rounds):
        terms = input_terms if weight.kind == "dense" else 1
        return form(kind="int8", block=_ROUNDED_BLOCK, has_zero_points=False, input_terms=terms)
    return form(kind=weight.kind)


def storage(part: WeightPart) -> tuple[str, bool] | None:
    """Kind of a weight as stored, and whether its scales are quantized; None: not of few bits.

    Kinds are those of `PackedForm`. Weights of one input are merged only if they are stored alike.
    """
    codes, scales = part.stored[0], part.stored[1] if len(part.stored) > 1 else None
    if isinstance(codes, Joined):
        kind = "" if codes.form.by_table else f"int{codes.form.bits}"
    else:
        kind = "int4" if codes.dtype in (ir.DataType.INT4, ir.DataType.UINT4) else ""
    if isinstance(scales, Factors):
        block = 32 if kind in ("int4", "int5") else 16
        is_known = scales.shared * part.block_size == SPAN and part.block_size == block
        return (kind, True) if is_known and _SCALED.get(kind) == part.has_minima else None
    if kind == "int2" and not part.is_unsigned and part.block_size % BLOCKS[0] == 0:
        return kind, False
    return (kind, False) if kind == "int5" and part.block_size % BLOCKS[1] == 0 else None


def _int4_block(width: int, *, of_expert: bool) -> int:
    return expert_block(width) if of_expert else INT4_BLOCK * (width % INT4_BLOCK == 0)


def float_kind(dtype: ir.DataType) -> str:
    """The kind of a packed float weight."""
    return _HALVES.get(dtype, "float32")


def keeps_codes(weight: LinearWeight, rounds: str = "") -> bool:
    """Whether a packed weight has the checkpoint's codes; `rounds` as in `form_of`."""
    if weight.kind == "fp8" and rounds == "int8":
        return False
    return all(_block(part) for part in weight.parts)


def _block(part: WeightPart) -> int:
    """Inputs that share a packed scale; 0: the weight must be requantized."""
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
    """The packed weight in pieces: all cores decode a few of its channels at a time.

    `order` of the output channels, None: unchanged.
    """
    order = np.arange(form.out_features) if order is None else order
    has_codes = form.takes_codes and keeps_codes(weight, form.kind)
    slices = [order[part] for part in channel_slices(form, keeps_codes=has_codes)]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        multiplier, pack = _packer(form, weight, slices, threads)
        yield form.header(multiplier)
        yield from _in_turn(threads, pack, slices)


_Pack = Callable[[_Order], bytes]  # returns the records of some channels


def _packer(
    form: PackedForm, weight: LinearWeight, slices: list[_Order], threads: ThreadPoolExecutor
) -> tuple[float, _Pack]:
    """The multiplier of scales, from all channels, and a function that packs some channels."""
    if not form.is_quantized:
        return 1.0, lambda order: float_records(form, *_some(weight, order, _bits))
    if form.kind == "fp8":
        return 1.0, lambda order: fp8_records(form, *_some(weight, order, _fp8_of(form)))
    if form.has_quantized_scales:
        return 1.0, _Stored(form, weight).pack_blocks
    if keeps_codes(weight, form.kind):
        stored = _Stored(form, weight)
        factors = max(threads.map(stored.largest_factor, slices))
        return scale_multiplier(factors), partial(stored.pack, scale_multiplier(factors))
    largest = 127 if form.kind == "int8" else 7
    tops = threads.map(lambda order: np.abs(*_some(weight, order, _rows)).max(), slices)
    multiplier = scale_multiplier(float(max(tops)) / largest)
    return multiplier, partial(_rounded, form, weight, multiplier)


def _in_turn(threads: ThreadPoolExecutor, pack: _Pack, slices: Iterable[_Order]) -> Iterator[bytes]:
    """Records in order, with a short queue for slow disks."""
    waiting: deque[Future[bytes]] = deque()
    for each in slices:
        waiting.append(threads.submit(pack, each))
        if len(waiting) > 2 * (os.cpu_count() or 1):
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _rounded(form: PackedForm, weight: LinearWeight, multiplier: float, order: _Order) -> bytes:
    """Records of floats, and of codes that are requantized."""
    (rows,) = _some(weight, order, _rows)
    if form.kind == "int8":
        codes, scales = rows_of_int8(rows, form.block)
        unsigned = (codes[:, : form.in_features] + np.int16(128)).astype(np.uint8)
    else:
        codes, scales = nearest_int4_rows(rows, form.block)
        unsigned = (codes + np.int8(8)).view(np.uint8)
    return records(form, words_of_codes(form, unsigned), scales, None, multiplier)


class _Stored:
    """Packs a weight that keeps its codes."""

    def __init__(self, form: PackedForm, weight: LinearWeight) -> None:
        self._form, self._weight = form, weight
        self._middles = {part.parameter: middle_of(part, form) for part in weight.parts}

    def largest_factor(self, order: _Order) -> float:
        """The largest scale or offset of some channels."""
        return largest_factor(*self._factors(order))

    def pack(self, multiplier: float, order: _Order) -> bytes:
        """The records of some channels."""
        (words,) = _some(self._weight, order, self._words)
        return records(self._form, words, *self._factors(order), multiplier)

    def pack_blocks(self, order: _Order) -> bytes:
        """The records of some channels with quantized scales."""
        words, *factors = _some(self._weight, order, self._blocks)
        pairs = zip(factors[::2], factors[1::2], strict=True)
        return block_records(self._form, words, [QuantizedScales(*each) for each in pairs])

    def _blocks(self, part: WeightPart) -> tuple[np.ndarray, ...]:
        """Words, then codes and scales of the scales, and of the minima that are subtracted."""
        arrays = [*self._words(part)]
        for factors, sign in zip(part.stored[1:], (1, -1), strict=False):
            assert isinstance(factors, Factors)
            arrays += [sign * stored_array(factors.codes), stored_array(factors.scales)]
        return tuple(arrays)

    def _factors(self, order: _Order) -> tuple[np.ndarray, np.ndarray | None]:
        scales, *offsets = _some(self._weight, order, self._both)
        return scales, offsets[0] if offsets else None

    def _words(self, part: WeightPart) -> tuple[NDArray[np.uint32], ...]:
        """Words [out, ...] of codes relative to the middle of the form's range."""
        form, stored = self._form, part.stored[0]
        shift = form.middle - self._middles[part.parameter]
        is_whole = part.is_by_output and part.shape[0] == form.blocks * form.block
        if is_whole and form.kind in _NIBBLES and (found := stored_pairs(stored)) is not None:
            pairs, excess = found
            if (shift - excess) % 16 in (0, _SIGN):
                words = words_of_pairs(pairs)
                if (shift - excess) % 16:
                    words ^= _SIGNS
                return (words,)
        codes = stored_array(stored).view(np.uint8)
        if shift:
            codes = codes + np.uint8(shift % 256)
        return ((words_of_codes if part.is_by_output else words_of_columns)(form, codes),)

    def _both(self, part: WeightPart) -> tuple[np.ndarray, ...]:
        """Scales [out, blocks]; and offsets, if the form has them."""
        scales = _spread(part.scales(), part, self._form).T
        if not self._form.has_zero_points:
            return (scales,)
        if not part.is_unsigned:
            return scales, np.zeros(scales.shape, np.float32)
        offsets = part.offsets(self._middles[part.parameter])
        return scales, _spread(offsets, part, self._form).T


def middle_of(part: WeightPart, form: PackedForm) -> int:
    """The zero point of codes, 0 if they are signed.

    Codes with fewer bits than their packed form use their own middle, so offsets stay small.
    """
    if not part.is_unsigned or form.has_quantized_scales:
        return 0
    middle = MIDDLES.get(form.kind, 0)
    if not part.has_minima:
        return middle
    largest = 0
    for some in part.slices():
        largest = max(largest, int(stored_array(some.stored[0]).max()))
        if largest == 2 * middle - 1:
            break
    return (largest + 1) // 2


_Read = Callable[[WeightPart], tuple[np.ndarray, ...]]  # arrays [out, ...] of a slice of a part


def _some(weight: LinearWeight, order: _Order, read: _Read) -> tuple[np.ndarray, ...]:
    """Output channels of `read`, in this order: [len(order), ...]."""
    found: list[tuple[NDArray[np.int64], list[np.ndarray]]] = []
    begin = 0
    for part, width in zip(weight.parts, weight.widths, strict=True):
        places = np.flatnonzero((order >= begin) & (order < begin + width))
        if len(places):
            own = order[places] - begin
            first, end = int(own.min()), int(own.max()) + 1
            arrays = read(part.outputs(slice(first, end)))
            if end - first > len(own) or (np.diff(own) != 1).any():
                arrays = tuple(array[own - first] for array in arrays)
            found.append((places, [*arrays]))
        begin += width
    if len(found) == 1:
        return tuple(found[0][1])
    results = [np.empty((len(order), *each.shape[1:]), each.dtype) for each in found[0][1]]
    for places, arrays in found:
        for result, array in zip(results, arrays, strict=True):
            result[places] = array
    return tuple(results)


def _rows(part: WeightPart) -> tuple[NDArray[np.float32], ...]:
    """float32 [out, in]."""
    return (part.dense().T.astype(np.float32, copy=False),)


def _bits(part: WeightPart) -> tuple[np.ndarray, ...]:
    """Bits of floats [out, in], as stored."""
    rows = stored_array(part.stored[0])
    return (rows.view(np.dtype(f"u{rows.itemsize}")),)


def _fp8_of(form: PackedForm) -> _Read:
    """A reader of code bits [out, in] and scales [out, blocks]."""

    def read(part: WeightPart) -> tuple[np.ndarray, ...]:
        codes = stored_array(part.stored[0]).view(np.uint8)
        return codes.T, _spread(part.scales(), part, form).T

    return read


def _spread(per_block: np.ndarray, part: WeightPart, form: PackedForm) -> np.ndarray:
    """One row for each block of the form."""
    repeats = part.block_size // form.block if part.block_size else 1
    return np.broadcast_to(np.repeat(per_block, repeats, 0), (form.blocks, part.shape[1]))
