"""Quantized linear layers in the form of graphs: codes, scales, and rounding of inputs.

Arrays are in the order of DequantizeLinear-24: codes [in, out] with blocks along axis 0, but
FLOAT4E2M1 [out, in] with blocks along axis 1, as TensorRT needs and ModelOpt stores them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.core.errors import BrokenArtifactError, UnsupportedModelError
from edgellm.core.onnx_functions import PackedCodes
from edgellm.export.checkpoints.weights import StoredTensor, as_bytes

Load = Callable[[], np.ndarray]


@dataclass(frozen=True, slots=True)
class InputRounding:
    """Rounding of a layer's input."""

    dtype: ir.DataType  # INT8, FLOAT8E4M3FN or FLOAT4E2M1
    scale: float  # of the tensor; for FLOAT4E2M1 of its block scales (computed at run time)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLinear:
    """`y = (codes - zero_points) * scales`, as DequantizeLinear does it."""

    codes: StoredTensor
    scales: StoredTensor
    block_size: int  # inputs that share a scale; 0: one scale per output channel, or one in total
    zero_points: StoredTensor | None = None
    global_scale: float | None = None  # of NVFP4's block scales, which are FLOAT8E4M3FN
    input: InputRounding | None = None  # None: weight-only
    input_order: np.ndarray | None = None  # int64 [in]: the codes' inputs are x[..., input_order]


@dataclass(frozen=True, slots=True)
class BlockFactors:
    """A number for each block of a weight, [out, in / block]: float16, or quantized."""

    values: StoredTensor  # float16, or INT8
    scales: StoredTensor | None = None  # of codes, float16 [out, blocks / shared]
    shared: int = 0  # blocks that share one of `scales`


@dataclass(frozen=True, slots=True)
class StoredPlanes:
    """Codes in planes, uint8 [..., in * bits / 8] each."""

    form: PackedCodes
    planes: tuple[StoredTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeight:
    """A weight [out, in] as `codes * scales + minima`, with blocks along the input."""

    codes: StoredTensor | StoredPlanes
    block_size: int
    scales: BlockFactors
    minima: BlockFactors | None = None
    input_order: np.ndarray | None = None  # as that of `QuantizedLinear`


def stored(name: str, dtype: ir.DataType, shape: tuple[int, ...], load: Load) -> StoredTensor:
    """A tensor that is loaded as a whole when it is written."""

    def stream() -> Iterator[memoryview]:
        yield as_bytes(load())

    return StoredTensor(name=name, dtype=dtype, shape=shape, stream=stream)


def scale_tensor(
    name: str, shape: tuple[int, ...], dtype: ir.DataType, load: Load, *, has_signs: bool = False
) -> StoredTensor:
    """Scales in the activation type; rejected if out of its range.

    Raises (when the tensor is written):
        BrokenArtifactError: a scale is not a positive number (with signs: zero), or none in
            `dtype`.
        UnsupportedModelError: scales that are integers.
    """
    wanted = "number other than zero" if has_signs else "positive number"

    def are_sound(scales: np.ndarray) -> bool:
        sizes = np.abs(scales) if has_signs else scales
        return bool(np.isfinite(scales).all() and (sizes > 0).all())

    def checked() -> np.ndarray:
        found = load()
        if found.dtype.kind in "iu":  # exponents (E8M0), or damaged
            raise UnsupportedModelError(
                f"{name} is stored as {found.dtype}", hint="scales that are floats are supported"
            )
        scales = found.astype(np.float32)
        if not are_sound(scales):
            raise BrokenArtifactError(
                f"{name} has a value that is not a {wanted}",
                hint="the checkpoint was quantized from weights that were zero or not numbers",
            )
        cast = scales.astype(dtype.numpy())
        if not are_sound(cast):
            raise BrokenArtifactError(
                f"{name} leaves the range of {dtype.name.lower()}", hint="export with --dtype fp32"
            )
        return cast

    return stored(name, dtype, shape, checked)


def pair_nibbles(codes: np.ndarray) -> np.ndarray:
    """Pack 4-bit codes [rows, columns] as in ONNX: two neighbours per byte, the first low."""
    nibbles = codes.astype(np.uint8) & np.uint8(15)
    flat = nibbles.reshape(-1)
    if len(flat) % 2:
        flat = np.append(flat, np.uint8(0))
    return flat[0::2] | flat[1::2] << np.uint8(4)


def finite_fp8(name: str, codes: np.ndarray) -> np.ndarray:
    """`codes`, float8_e4m3fn or another type; NaN in float8 is rejected.

    Raises:
        BrokenArtifactError: a float8 is NaN.
    """
    if codes.dtype.itemsize == 1 and codes.dtype.kind not in "iu":
        bits = codes.view(np.uint8)
        if ((bits & np.uint8(0x7F)) == 0x7F).any():
            raise BrokenArtifactError(
                f"{name}weight holds values that are not numbers",
                hint="an all-zero or damaged weight was quantized; quantize it again",
            )
    return codes


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsignedBlocks:
    """Unsigned integer codes of a layer, in blocks along the input; scales may be negative.

    Attributes:
        name: prefix of the layer's tensors.
        bits: 4 or 8.
        shape: [out, in].
        codes: unsigned values, uint8 [in, out].
        zeros: unsigned values, uint8 [blocks, out]; None: 2**(bits - 1) everywhere.
        scale: floats [blocks, out].
        blocks: along the input.
        input_order: see `QuantizedLinear`.
    """

    name: str
    bits: int
    shape: tuple[int, int]
    codes: Load
    zeros: np.ndarray | None
    scale: Load
    blocks: int
    input_order: np.ndarray | None = None


def integer_blocks(layer: UnsignedBlocks, dtype: ir.DataType) -> QuantizedLinear:
    """Convert a stored layer; `dtype` is that of the scales in the graph.

    Raises:
        BrokenArtifactError: `blocks` does not divide the inputs.
    """
    name, bits, blocks, zeros = layer.name, layer.bits, layer.blocks, layer.zeros
    out, width = layer.shape
    if blocks < 1 or width % blocks:
        raise BrokenArtifactError(f"{name}: {blocks} blocks do not divide {width} inputs")
    middle = np.uint8(1 << (bits - 1))
    is_symmetric = zeros is None or bool((zeros == middle).all())
    signed = (ir.DataType.INT4 if bits == 4 else ir.DataType.INT8) if is_symmetric else None
    kind = signed or (ir.DataType.UINT4 if bits == 4 else ir.DataType.UINT8)

    def ready(values: np.ndarray) -> np.ndarray:
        values = values - middle if is_symmetric else values  # wraps: two's complement
        return pair_nibbles(values) if bits == 4 else values

    zero_points = None
    if zeros is not None and not is_symmetric:
        zero_points = stored(f"{name}weight_zero_point", kind, (blocks, out), lambda: ready(zeros))
    scales = scale_tensor(f"{name}weight_scale", (blocks, out), dtype, layer.scale, has_signs=True)
    return QuantizedLinear(
        codes=stored(f"{name}weight", kind, (width, out), lambda: ready(layer.codes())),
        scales=scales,
        block_size=width // blocks,
        zero_points=zero_points,
        input_order=layer.input_order,
    )
