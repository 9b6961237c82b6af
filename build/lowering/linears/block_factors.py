"""Operands of a linear layer or an embedding: stored, codes in planes, quantized scales and minima.

`slice_first` takes slices of all, `slice_last` of stored ones; both read only these from a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.function_calls import CODES, is_call, require_known
from edgellm.build.lowering.weights import stored_array, stored_bytes, stored_columns
from edgellm.core.errors import BrokenArtifactError
from edgellm.core.onnx_functions import BLOCK_FACTORS, FUNCTIONS_OF_CODES, IQ4, PackedCodes


class _Made(ir.LazyTensor):
    """A tensor that is computed at each read, without caching."""

    def __init__(
        self, *, make: Callable[[], np.ndarray], dtype: ir.DataType, dims: Sequence[int], name: str
    ) -> None:
        self._make = make
        super().__init__(lambda: ir.tensor(make(), dtype=dtype), dtype, ir.Shape(dims), name=name)

    def numpy(self) -> np.ndarray:
        """The array without a tensor around it, which would cost as much as a small array."""
        return self._make()


class Factors(_Made):
    """Codes times scales, one for `shared` codes: float32."""

    def __init__(
        self, *, codes: ir.TensorProtocol, scales: ir.TensorProtocol, shared: int, name: str
    ) -> None:
        """`codes` [..., n] and `scales` [..., n / shared]."""
        self.codes, self.scales, self.shared = codes, scales, shared
        super().__init__(
            make=self._decoded, dtype=ir.DataType.FLOAT, dims=tuple(codes.shape.numpy()), name=name
        )

    def _decoded(self) -> np.ndarray:
        repeated = np.repeat(stored_array(self.scales).astype(np.float32), self.shared, -1)
        return stored_array(self.codes).astype(np.float32) * repeated


class Joined(_Made):
    """Codes of planes: int8 or uint8 [..., in]."""

    def __init__(
        self, *, planes: Sequence[ir.TensorProtocol], form: PackedCodes, name: str
    ) -> None:
        """`planes`: uint8 [..., in * bits / 8] each."""
        self.planes, self.form = planes, form
        *outer, width = (int(dim) for dim in planes[0].shape.numpy())
        super().__init__(
            make=self._joined,
            dtype=ir.DataType.INT8 if form.has_signs else ir.DataType.UINT8,
            dims=(*outer, width * 8 // form.planes[0]),
            name=name,
        )

    def _joined(self) -> np.ndarray:
        form = self.form
        low, *high = (
            _spread(stored_array(plane), bits)
            for plane, bits in zip(self.planes, form.planes, strict=True)
        )
        for part in high:
            low |= part << np.uint8(form.planes[0])
        if form.by_table:
            return np.array(IQ4, np.int8)[low]
        return (low - np.uint8(1 << (form.bits - 1))).view(np.int8) if form.is_signed else low


def _spread(plane: np.ndarray, bits: int) -> np.ndarray:
    """The parts of all codes, uint8 [..., in]."""
    words = plane.astype(f"<u{8 // bits}")
    half = 4
    while half >= bits:  # halves move apart, until each part has a byte of its own
        distance = 8 * half // bits
        words |= words << words.dtype.type(distance - half)
        ones = sum(((1 << half) - 1) << at for at in range(0, 8 * words.itemsize, distance))
        words &= words.dtype.type(ones)
        half //= 2
    return words.view(np.uint8)


def stored_pairs(tensor: ir.TensorProtocol) -> tuple[np.ndarray, int] | None:
    """4-bit codes as stored, two in a byte, the first in the low half: uint8 [..., n / 2].

    Returns:
        The pairs, and by how much their halves exceed the codes, modulo 16; None: other codes.
    """
    if isinstance(tensor, Joined) and tensor.form.planes == (4,) and not tensor.form.by_table:
        return stored_array(tensor.planes[0]), 8 * tensor.form.is_signed
    *outer, width = (int(dim) for dim in tensor.shape.numpy())
    if isinstance(tensor, Joined) or tensor.dtype.bitwidth != 4 or width % 2:
        return None
    return stored_bytes(tensor).reshape(*outer, width // 2), 0


def stored_tensor(value: ir.Value, call: ir.Node) -> ir.TensorProtocol:
    """An operand of `call`.

    Raises:
        BrokenArtifactError: it is computed.
    """
    if value.const_value is not None:
        return value.const_value
    factors = value.producer()
    if factors is not None and is_call(factors, *CODES):
        require_known(factors)
        planes = [stored_tensor(each, call) for each in factors.inputs if each is not None]
        form = FUNCTIONS_OF_CODES[factors.op_type]
        return Joined(planes=planes, form=form, name=str(value.name))
    if factors is None or not is_call(factors, BLOCK_FACTORS):
        raise BrokenArtifactError(
            f"{call.name}: {value.name} is not a stored weight", hint="export the bundle again"
        )
    require_known(factors, "block_size")
    codes, scales = (stored_tensor(each, call) for each in factors.inputs if each is not None)
    return Factors(
        codes=codes,
        scales=scales,
        shared=factors.attributes["block_size"].as_int(),
        name=str(value.name),
    )


def slice_first(
    tensor: ir.TensorProtocol, part: slice, *, drops_axis: bool = False
) -> ir.TensorProtocol:
    """Entries of the first axis, or the whole tensor if all entries share it.

    `drops_axis`: drop the axis of a single entry.
    """
    if isinstance(tensor, Factors):
        codes, scales = (
            slice_first(each, part, drops_axis=drops_axis) for each in (tensor.codes, tensor.scales)
        )
        return Factors(codes=codes, scales=scales, shared=tensor.shared, name=str(tensor.name))
    if isinstance(tensor, Joined):
        planes = [slice_first(each, part, drops_axis=drops_axis) for each in tensor.planes]
        return Joined(planes=planes, form=tensor.form, name=str(tensor.name))
    dims = [int(dim) for dim in tensor.shape.numpy()]
    if not dims or (dims[0] == 1 and not drops_axis):
        return tensor
    first, taken = (0, 1) if dims[0] == 1 else (part.start, part.stop - part.start)
    shape = dims[1:] if drops_axis else [taken, *dims[1:]]
    if not isinstance(tensor, ir.ExternalTensor):
        array = tensor.numpy()[first : first + taken].reshape(shape)
        return ir.tensor(array, dtype=tensor.dtype, name=tensor.name)
    size = math.prod(dims[1:]) * tensor.dtype.bitwidth // 8
    return ir.ExternalTensor(
        tensor.location, (tensor.offset or 0) + first * size, taken * size, tensor.dtype,
        shape=ir.Shape(shape), name=f"{tensor.name}.{first}", base_dir=tensor.base_dir,
    )  # fmt: skip


def slice_last(tensor: ir.TensorProtocol, part: slice) -> ir.TensorProtocol:
    """Entries of the last axis, or the whole tensor if shared; 4-bit integers become bytes."""
    dims = [int(dim) for dim in tensor.shape.numpy()]
    if not dims or dims[-1] == 1:
        return tensor
    kinds = {ir.DataType.INT4: ir.DataType.INT8, ir.DataType.UINT4: ir.DataType.UINT8}
    dtype = kinds.get(tensor.dtype, tensor.dtype)
    dims[-1] = part.stop - part.start
    return _Made(
        make=lambda: stored_columns(tensor, part), dtype=dtype, dims=dims, name=str(tensor.name)
    )
