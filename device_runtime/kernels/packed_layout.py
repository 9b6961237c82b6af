"""Packs weights of linear layers for the kernels, as a stream of records.

A record covers 32 output channels and one group of inputs. It has the quantized weights, 32 FP16
scales and, with zero points, 32 FP16 products of scale and (zero point - middle). Weights of four
inputs of a channel are adjacent: bytes [4 inputs' group][channel][input]. Codes of fewer than 8
bits are in units of such words; see `words_of_codes`. Floats, and FP8 with its 32 FP32 scales, are
[input][channel]. All instruction sets use this layout.

Where scales are quantized, as in K-quants, a record covers 256 inputs: their codes, for each block
32 scales of 8 bits, minima likewise, and 32 FP16 scales of the scales and of the minima. Scales and
minima of 2-bit codes have 4 bits, in the low and high halves of a byte.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

GROUP = 32  # output channels of a record
STRIP = 16  # gate and up are interleaved by this number of channels
BLOCKS = (16, 32, 64, 128)
SPAN = 256  # inputs that share the scale of their quantized scales
VERSION = 2  # of the layout
_MAGIC = b"edgellmW"
_FORMS = {
    "int4": 1,
    "int8": 2,
    "float16": 3,
    "bfloat16": 4,
    "fp4": 5,
    "fp8": 6,
    "float32": 7,
    "int2": 8,
    "int3": 9,
    "int5": 10,
    "int6": 11,
}
# Default zero points of unsigned weights
MIDDLES = {"int2": 2, "int3": 4, "int4": 8, "int5": 16, "int6": 32, "int8": 128, "fp4": 0}
_BITS = {"int2": 2, "int3": 3, "int4": 4, "int5": 5, "int6": 6, "fp4": 4, "int8": 8, "fp8": 8}
_PAIRED = "int2"  # whose quantized scale and minimum share a byte
_LARGEST_OFFSET = 2.0**14  # relative to the multiplier, at least half of the largest
_HEADER = struct.Struct("<8s7I f Q 2I 8x")
_OF_HALVES = 2.0**8  # FP8 value divided by the FP16 value of the same bits
_WEIGHTS_AT_ONCE = 1 << 20
_TIMES_CODES = 4  # as many codes at once as floats: they take a fraction of the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedForm:
    """The format of a packed weight.

    Attributes:
        kind: "int2" to "int6", "int8", "fp4", "fp8", "float16", "bfloat16" or "float32".
        in_features: K.
        out_features: N; of gated weights the sum of gate and up.
        block: group size of scales, for FP8 any number; 1 for floats.
        has_zero_points: integers only; with quantized scales, has minima.
        is_gated: gate and up are interleaved by 16 channels; see `gated_order`.
        input_terms: INT8 terms of a quantized input; 2 only for "int8".
        has_quantized_scales: "int2", "int4" and "int5" with minima, "int3" and "int6" without.
    """

    kind: str
    in_features: int
    out_features: int
    block: int = 1
    has_zero_points: bool = False
    is_gated: bool = False
    input_terms: int = 1
    has_quantized_scales: bool = False

    @property
    def is_quantized(self) -> bool:
        """Whether the weight has scales."""
        return self.kind in _BITS

    @property
    def takes_codes(self) -> bool:
        """Whether inputs are quantized to INT8."""
        return self.kind in MIDDLES

    @property
    def blocks(self) -> int:
        """Groups of one channel; the last may be padded."""
        return -(-self.in_features // self.block)

    @property
    def middle(self) -> int:
        """The code of zero, without zero points."""
        has_minima = self.has_quantized_scales and self.has_zero_points
        return 0 if has_minima else MIDDLES[self.kind]

    @property
    def span(self) -> int:
        """Inputs of a record."""
        return SPAN if self.has_quantized_scales else self.block

    @property
    def records(self) -> int:
        """Records of one channel; the last may be padded."""
        return -(-self.in_features // self.span)

    @property
    def record_bytes(self) -> int:
        """Bytes of 32 channels and one record's inputs."""
        bits = 32 if self.kind == "float32" else _BITS.get(self.kind, 16)
        scales = 2 * (1 + self.has_zero_points) if self.takes_codes else 4 * self.is_quantized
        if self.has_quantized_scales:
            has_own_minima = self.has_zero_points and self.kind != _PAIRED
            scales += self.span // self.block * (1 + has_own_minima)
        return self.span * GROUP * bits // 8 + scales * GROUP

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weight, header included."""
        return _HEADER.size + -(-self.out_features // GROUP) * self.records * self.record_bytes

    def header(self, multiplier: float = 1.0) -> bytes:
        """The first 64 bytes; `multiplier` applies to all scales."""
        return _HEADER.pack(
            _MAGIC, VERSION, _FORMS[self.kind], self.in_features, self.out_features, self.block,
            self.has_zero_points, self.is_gated, multiplier, self.num_bytes, self.input_terms,
            self.has_quantized_scales,
        )  # fmt: skip


def gated_order(width: int) -> np.ndarray:
    """Rows of a weight [gate; up], `width` each, in the order of a gated one: int64 [2 * width].

    Raises:
        ValueError: if `width` is not a multiple of 16.
    """
    if width % STRIP:
        raise ValueError(f"gated layers come in steps of {STRIP} channels, not {width}")
    gate = np.arange(width).reshape(-1, STRIP)
    return np.concatenate([gate, gate + width], axis=1).ravel()


def scale_multiplier(largest_scale: float) -> float:
    """The power of two that scales the largest scale near the FP16 maximum."""
    if not largest_scale > 0:
        return 1.0
    return 2.0 ** (math.frexp(largest_scale)[1] - 1)


def largest_factor(scales: np.ndarray, offsets: np.ndarray | None) -> float:
    """The argument of `scale_multiplier`: the largest scale or offset of all channels."""
    largest = float(np.abs(scales).max(initial=0))
    if offsets is None:
        return largest
    return max(largest, float(np.abs(offsets).max(initial=0)) / _LARGEST_OFFSET)


def pack_codes(
    form: PackedForm,
    codes: np.ndarray,
    scales: np.ndarray,
    zero_points: np.ndarray | None = None,
    *,
    offsets: np.ndarray | None = None,
    multiplier: float | None = None,
) -> Iterator[bytes]:
    """Pack a quantized weight in chunks; weight = (code - zero point) * scale.

    Or, with offsets, (code - 8 or 128) * scale - offset.

    Args:
        form: the format; channels are in their final order.
        codes: quantized weights, uint8 [N, K], 0 to 15 or 0 to 255.
        scales: float [N, blocks]; for FP4 half of the scales, since codes are doubled values.
        zero_points: uint8 [N, blocks]; None: 8 or 128.
        offsets: float [N, blocks], instead of zero points.
        multiplier: see `scale_multiplier`; None: computed from the scales.

    Yields:
        The header, then chunks of channels.
    """
    if codes.shape != (form.out_features, form.in_features):
        raise ValueError(f"codes are {codes.shape}")
    if scales.shape != (form.out_features, form.blocks):
        raise ValueError(f"scales are {scales.shape}")
    if multiplier is None:
        multiplier = scale_multiplier(largest_factor(scales, offsets))
    yield form.header(multiplier)
    for part in channel_slices(form):
        found = None if offsets is None else offsets[part]
        if zero_points is not None:
            found = scales[part] * (zero_points[part].astype(np.float32) - MIDDLES[form.kind])
        words = words_of_codes(form, codes[part])
        yield records(form, words, scales[part], found, multiplier)


def channel_slices(form: PackedForm, *, keeps_codes: bool = False) -> Iterator[slice]:
    """Chunks of channels, small enough for several copies of their weights in memory.

    `keeps_codes`: the weights are stored as codes and are not decoded.
    """
    weights = _WEIGHTS_AT_ONCE * (_TIMES_CODES if keeps_codes else 1)
    step = max(GROUP, weights // form.in_features // GROUP * GROUP)
    for first in range(0, form.out_features, step):
        yield slice(first, min(first + step, form.out_features))


def records(
    form: PackedForm,
    words: np.ndarray,
    scales: np.ndarray,
    offsets: np.ndarray | None,
    multiplier: float,
) -> bytes:
    """The records of one of `channel_slices`; see `pack_codes`, and `words_of_codes` for words."""
    halves = [scales.astype(np.float32) / multiplier]
    if form.has_zero_points:
        found = np.zeros(scales.shape, np.float32) if offsets is None else offsets
        halves.append(found.astype(np.float32) / np.float32(multiplier))
    return _quantized_records(form, words, [], halves)


@dataclass(frozen=True, slots=True)
class QuantizedScales:
    """Scales or minima that are quantized: `codes` times a scale for each 256 inputs.

    Attributes:
        codes: int8 [n, blocks]; of 2-bit weights 0 to 15.
        scales: float16 [n, records].
    """

    codes: np.ndarray
    scales: np.ndarray

    def __getitem__(self, part: slice) -> QuantizedScales:
        """Some channels."""
        return QuantizedScales(self.codes[part], self.scales[part])


def pack_blocks(
    form: PackedForm,
    codes: np.ndarray,
    scales: QuantizedScales,
    minima: QuantizedScales | None = None,
) -> Iterator[bytes]:
    """Pack a weight with quantized scales in chunks.

    With minima, weight = code * scale - minimum; else (code - middle) * scale.

    Args:
        form: the format; channels are in their final order.
        codes: uint8 [N, K].
        scales: of all channels.
        minima: likewise.
    """
    yield form.header()
    for part in channel_slices(form):
        factors = [each[part] for each in (scales, minima) if each is not None]
        yield block_records(form, words_of_codes(form, codes[part]), factors)


def block_records(form: PackedForm, words: np.ndarray, factors: list[QuantizedScales]) -> bytes:
    """The records of one of `channel_slices`; `factors`: scales, and minima if any."""
    codes = [each.codes.view(np.uint8) for each in factors]
    if form.kind == _PAIRED:
        codes = [codes[0] | codes[1] << np.uint8(4)]
    return _quantized_records(form, words, codes, [each.scales for each in factors])


def words_of_codes(form: PackedForm, codes: np.ndarray) -> np.ndarray:
    """The codes in units of words: uint32 [n, K / 32 * bits].

    A unit has the fewest words that hold a multiple of four codes. Byte i of a word is of the
    inputs i, 4 + i, 8 + i and so on. A byte holds as many codes as fit, from its lowest bit on;
    the bits that are left hold the last codes of the unit. K is padded to whole blocks.

    Args:
        form: the format.
        codes: uint8 [n, K].
    """
    wide = _padded(codes, form.blocks * form.block, MIDDLES[form.kind], group=1)
    quads = np.ascontiguousarray(wide).view(np.uint32)
    bits = _BITS[form.kind]
    count = math.gcd(bits, 8)
    if bits == 8:
        return quads
    quads = quads.reshape(len(quads), -1, 8 // count)
    words = np.zeros((*quads.shape[:2], bits // count), np.uint32)
    for quad in range(quads.shape[2]):
        for word, start, width, to in _pieces(bits, quad):
            part = quads[..., quad]
            if width < bits:
                part = part >> np.uint32(to) & np.uint32(((1 << width) - 1) * 0x01010101)
            words[..., word] |= part << np.uint32(start)
    return words.reshape(len(words), -1)


def _pieces(bits: int, quad: int) -> Iterator[tuple[int, int, int, int]]:
    """Where the codes of a quad are: word, first bit there, number of bits, first bit of a code."""
    whole, rest = divmod(8, bits)
    words = bits // math.gcd(bits, 8)
    if quad < words * whole:
        yield quad // whole, quad % whole * bits, bits, 0
        return
    to = 0
    while to < bits:
        word, used = divmod((quad - words * whole) * bits + to, rest)
        width = min(rest - used, bits - to)
        yield word, 8 - rest + used, width, to
        to += width


def words_of_pairs(pairs: np.ndarray) -> np.ndarray:
    """`words_of_codes` of 4-bit codes in pairs, the first in the low half: uint8 [n, K / 2].

    K is a multiple of 8, and whole blocks.
    """
    words = pairs.view(np.uint32).copy()
    moved = np.empty_like(words)
    # Swap the two middle quarters of each 32, then of each 16 bits
    for step, mask in ((8, 0x0000FF00), (4, 0x00F000F0)):
        np.right_shift(words, step, out=moved)
        moved ^= words
        moved &= np.uint32(mask)
        words ^= moved
        moved <<= np.uint32(step)
        words ^= moved
    return words


def words_of_columns(form: PackedForm, columns: np.ndarray) -> np.ndarray:
    """`words_of_codes` of codes that are stored by input: uint8 [K, n]."""
    width, count = columns.shape
    if width != form.blocks * form.block:
        return words_of_codes(form, columns.T)
    adjacent = np.empty((width // 4, count, 4), np.uint8)
    for place in range(4):
        adjacent[..., place] = columns[place::4]
    words = adjacent.view(np.uint32)[..., 0]
    if _BITS[form.kind] == 4:
        words = words[::2] | words[1::2] << np.uint32(4)
    return words.T


def pack_floats(form: PackedForm, weight: np.ndarray) -> Iterator[bytes]:
    """Pack a float weight in chunks.

    Args:
        form: "float16", "bfloat16" or "float32".
        weight: [N, K]; bfloat16 as uint16.
    """
    yield form.header()
    for part in channel_slices(form):
        yield float_records(form, weight[part])


def float_records(form: PackedForm, weight: np.ndarray) -> bytes:
    """The records of one of `channel_slices`; see `pack_floats`."""
    kind = np.uint32 if form.kind == "float32" else np.uint16
    rows = _padded(weight.view(kind), form.in_features, 0)
    return rows.reshape(-1, GROUP, form.in_features).transpose(0, 2, 1).tobytes()


def pack_fp8(form: PackedForm, codes: np.ndarray, scales: np.ndarray) -> Iterator[bytes]:
    """Pack an FP8 (E4M3) weight in chunks.

    Args:
        form: "fp8".
        codes: uint8 [N, K], without NaN.
        scales: float32 [N, blocks].
    """
    yield form.header()
    for part in channel_slices(form):
        yield fp8_records(form, codes[part], scales[part])


def fp8_records(form: PackedForm, codes: np.ndarray, scales: np.ndarray) -> bytes:
    """The records of one of `channel_slices`; see `pack_fp8`."""
    rows = _padded(codes, form.blocks * form.block, 0)
    lanes = rows.reshape(-1, GROUP, form.blocks, form.block).transpose(0, 2, 3, 1)
    packed = np.empty((*lanes.shape[:2], form.record_bytes), np.uint8)
    size = form.block * GROUP
    packed[..., :size] = lanes.reshape(*lanes.shape[:2], size)
    steps = _padded(scales, form.blocks, 0).reshape(-1, GROUP, form.blocks)
    steps = steps.transpose(0, 2, 1).astype(np.float32, order="C") * np.float32(_OF_HALVES)
    packed[..., size:] = steps.view(np.uint8)
    return packed.tobytes()


def _padded(rows: np.ndarray, width: int, value: int, *, group: int = GROUP) -> np.ndarray:
    """Pad `rows` to whole groups of channels and `width` columns."""
    count = -(-len(rows) // group) * group
    if rows.shape == (count, width):
        return rows
    out = np.full((count, width), value, rows.dtype)
    out[: len(rows), : rows.shape[1]] = rows
    return out


def _quantized_records(
    form: PackedForm, words: np.ndarray, factors: list[np.ndarray], halves: list[np.ndarray]
) -> bytes:
    """Records of `words_of_codes`, uint8 [n, blocks] factors, and floats [n, records]."""
    arrays = words, *factors, *(each.astype(np.float16) for each in halves)
    groups, start = -(-len(words) // GROUP), 0
    records = np.empty((groups, form.records, form.record_bytes), np.uint8)
    for values in arrays:  # padded channels have scales of zero
        rows = _padded(values, values.shape[1], 0).reshape(groups, GROUP, form.records, -1)
        part = np.ascontiguousarray(rows.transpose(0, 2, 3, 1)).view(np.uint8)
        part = part.reshape(groups, form.records, -1)
        records[..., start : start + part.shape[2]] = part
        start += part.shape[2]
    return records.tobytes()
