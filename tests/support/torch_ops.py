"""ONNX operators of lowered graphs in torch, on any of its devices.

Types are those of the graph: products of float16 are summed in float32, as in TensorRT. Codes
without a type in torch have a wider one: INT4 is int8, FP4 is float32. Shapes and axes
are numbers of the host, so that no operator waits for the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

_DTYPES = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.INT64: torch.int64,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT8: torch.int8,
    ir.DataType.UINT8: torch.uint8,
    ir.DataType.BOOL: torch.bool,
    ir.DataType.FLOAT8E4M3FN: torch.float8_e4m3fn,
    ir.DataType.INT4: torch.int8,
    ir.DataType.FLOAT4E2M1: torch.float32,
}
_VIEWS = {  # NumPy lacks these types
    ir.DataType.BFLOAT16: (np.int16, torch.bfloat16),
    ir.DataType.FLOAT8E4M3FN: (np.uint8, torch.float8_e4m3fn),
}
_E4M3_MAX, _E4M3_LEAST, _E2M1_MAX = 448.0, 2.0**-9, 6.0
# Products have a multiple of these rows: a library's kernel for fewer sums in another order, and
# then a token's logits would depend on the number of tokens in its pass.
_ROWS = 128


def tensor_of(value: ir.TensorProtocol) -> Tensor:
    """A constant of a graph, on the CPU; raises `TypeError` for an unknown type."""
    array: NDArray[Any] = np.ascontiguousarray(value.numpy()).reshape(tuple(value.shape))
    dtype = _dtype(value.dtype)
    if value.dtype in _VIEWS:
        kind, dtype = _VIEWS[value.dtype]
        return torch.from_numpy(array.view(kind).copy()).view(dtype)
    if value.dtype in (ir.DataType.INT4, ir.DataType.FLOAT4E2M1):
        array = array.astype(np.int8 if dtype == torch.int8 else np.float32)
    return torch.from_numpy(array.copy())


def _dtype(kind: int | ir.DataType) -> torch.dtype:
    if (found := _DTYPES.get(ir.DataType(kind))) is None:
        raise TypeError(f"torch_ops has no type {ir.DataType(kind).name}; add it to _DTYPES")
    return found


@dataclass(frozen=True, slots=True)
class Call:
    """A node with its inputs.

    Attributes:
        operator: its type.
        attributes: values by name.
        inputs: on the device; None where one is left out.
        hosts: the inputs that the host knows.
        num_outputs: of the node.
    """

    operator: str
    attributes: dict[str, Any]
    inputs: Sequence[Tensor | None]
    hosts: Sequence[Tensor | None] = field(repr=False)
    num_outputs: int

    def x(self, index: int = 0) -> Tensor:
        """A required input."""
        found = self.inputs[index]
        assert found is not None, f"input {index} of {self.operator} is left out"
        return found

    def has(self, index: int) -> bool:
        """Whether an input is given."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def numbers(self, index: int) -> list[int] | None:
        """An input as numbers of the host; None: it is left out."""
        if not self.has(index):
            return None
        if (found := self.hosts[index]) is None:
            raise ValueError(f"input {index} of {self.operator} depends on what a GPU computes")
        return [int(each) for each in found.reshape(-1).tolist()]

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute."""
        return self.attributes.get(name, default)


Outputs = Tensor | tuple[Tensor, ...]
OPERATORS: dict[str, Callable[[Call], Outputs]] = {}


def _operator(name: str) -> Callable[[Callable[[Call], Outputs]], Callable[[Call], Outputs]]:
    """Register what computes an operator."""

    def register(function: Callable[[Call], Outputs]) -> Callable[[Call], Outputs]:
        OPERATORS[name] = function
        return function

    return register


def _table(rules: dict[str, Callable[..., Tensor]]) -> None:
    """Register operators whose inputs are those of a torch function."""
    for name, function in rules.items():
        OPERATORS[name] = lambda call, function=function: function(
            *(call.x(index) for index in range(len(call.inputs)))
        )


_table(
    {
        "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Neg": torch.neg, "Abs": torch.abs,
        "Max": lambda *x: _folded(torch.maximum, x), "Min": lambda *x: _folded(torch.minimum, x),
        "Equal": torch.eq, "Less": torch.lt, "LessOrEqual": torch.le, "Greater": torch.gt,
        "GreaterOrEqual": torch.ge, "And": torch.logical_and, "Or": torch.logical_or,
        "Not": torch.logical_not, "Cos": torch.cos, "Sin": torch.sin, "Exp": torch.exp,
        "Erf": torch.erf, "Log": torch.log, "Reciprocal": torch.reciprocal, "Sqrt": torch.sqrt,
        "Sigmoid": torch.sigmoid, "Softplus": functional.softplus, "Tanh": torch.tanh,
        "Identity": lambda x: x, "Where": torch.where, "CastLike": lambda x, like: x.to(like.dtype),
        "Pow": lambda x, y: torch.pow(x, y).to(x.dtype), "MatMul": lambda x, y: _product(x, y),
    }
)  # fmt: skip


def _folded(function: Callable[[Tensor, Tensor], Tensor], inputs: Sequence[Tensor]) -> Tensor:
    found = inputs[0]
    for each in inputs[1:]:
        found = function(found, each)
    return found


@_operator("Div")
def _div(call: Call) -> Tensor:
    x, y = call.x(), call.x(1)
    if x.is_floating_point():
        return x / y
    return torch.div(x, y, rounding_mode="trunc")


@_operator("Cast")
def _cast(call: Call) -> Tensor:
    return call.x().to(_dtype(call.get("to")))


def _product(x: Tensor, y: Tensor) -> Tensor:
    """A matrix product; with a matrix of weights batch-invariant, see `_ROWS`."""
    if x.device.type == "cpu":  # where sums of float16 may be float16
        return _padded(x.float(), y.float()).to(x.dtype)
    return _padded(x, y)


def _padded(x: Tensor, y: Tensor) -> Tensor:
    if y.dim() != 2 or not x.numel():
        return torch.matmul(x, y)
    rows = x.reshape(-1, x.shape[-1])
    padding = -len(rows) % _ROWS
    product = torch.matmul(functional.pad(rows, (0, 0, 0, padding)), y)
    return product[: len(rows)].reshape(*x.shape[:-1], y.shape[1])


# ----------------------------------------------------------------------------------- shapes
@_operator("Shape")
def _shape(call: Call) -> Tensor:
    found = list(call.x().shape)[call.get("start", 0) : call.get("end")]
    return torch.tensor(found, dtype=torch.int64)  # of the host


@_operator("Reshape")
def _reshape(call: Call) -> Tensor:
    x, sizes = call.x(), call.numbers(1)
    assert sizes is not None
    if not call.get("allowzero", 0):
        sizes = [x.shape[at] if size == 0 else size for at, size in enumerate(sizes)]
    return x.reshape(sizes)


@_operator("Transpose")
def _transpose(call: Call) -> Tensor:
    x = call.x()
    return x.permute(call.get("perm") or tuple(reversed(range(x.dim()))))


@_operator("Unsqueeze")
def _unsqueeze(call: Call) -> Tensor:
    x, axes = call.x(), call.numbers(1)
    assert axes is not None
    rank = x.dim() + len(axes)
    for axis in sorted(each % rank for each in axes):
        x = x.unsqueeze(axis)
    return x


@_operator("Squeeze")
def _squeeze(call: Call) -> Tensor:
    x, axes = call.x(), call.numbers(1)
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


@_operator("Concat")
def _concat(call: Call) -> Tensor:
    return torch.cat([call.x(index) for index in range(len(call.inputs))], call.get("axis"))


@_operator("Split")
def _split(call: Call) -> tuple[Tensor, ...]:
    x, axis, sizes = call.x(), call.get("axis", 0), call.numbers(1)
    if sizes is None:
        count = call.get("num_outputs", call.num_outputs)
        return tuple(torch.split(x, -(-x.shape[axis] // count), axis))
    return tuple(torch.split(x, sizes, axis))


@_operator("Expand")
def _expand(call: Call) -> Tensor:
    x, sizes = call.x(), call.numbers(1)
    assert sizes is not None
    return x.expand(torch.broadcast_shapes(x.shape, tuple(sizes)))


@_operator("Slice")
def _slice(call: Call) -> Tensor:
    x, begins, ends = call.x(), call.numbers(1), call.numbers(2)
    assert begins is not None
    assert ends is not None
    axes, steps = call.numbers(3) or list(range(len(begins))), call.numbers(4)
    if set(steps or [1]) != {1}:
        raise ValueError(f"Slice with steps {steps} is not implemented")
    places = [slice(None)] * x.dim()
    for axis, begin, end in zip(axes, begins, ends, strict=True):
        places[axis] = slice(begin, end)
    return x[tuple(places)]


@_operator("Range")
def _range(call: Call) -> Tensor:
    ((begin,), (end,), (step,)) = (call.numbers(index) or [] for index in range(3))
    return torch.arange(begin, end, step, dtype=call.x().dtype, device=call.x().device)


@_operator("Gather")
def _gather(call: Call) -> Tensor:
    x, places, axis = call.x(), call.x(1), call.get("axis", 0) % call.x().dim()
    places = torch.where(places < 0, places + x.shape[axis], places)
    found = x.index_select(axis, places.reshape(-1))
    return found.reshape(*x.shape[:axis], *places.shape, *x.shape[axis + 1 :])


# ------------------------------------------------------------------------------- reductions
def _reduced(call: Call, function: Callable[..., Tensor]) -> Tensor:
    x = call.x()
    axes = call.numbers(1) or list(range(x.dim()))
    return function(x, dim=tuple(axes), keepdim=bool(call.get("keepdims", 1)))


OPERATORS["ReduceMax"] = lambda call: _reduced(call, torch.amax)
OPERATORS["ReduceMin"] = lambda call: _reduced(call, torch.amin)
OPERATORS["ReduceSum"] = lambda call: _reduced(call, torch.sum)
OPERATORS["ReduceMean"] = lambda call: _reduced(call, torch.mean)


@_operator("ArgMax")
def _arg_max(call: Call) -> Tensor:
    """The first of equal ones."""
    x, axis, keep = call.x(), call.get("axis", 0), bool(call.get("keepdims", 1))
    if call.get("select_last_index", 0):
        raise ValueError("ArgMax of the last index is not implemented")
    size = x.shape[axis]
    shape = [1] * x.dim()
    shape[axis] = size
    places = torch.arange(size, device=x.device).reshape(shape)
    is_largest = x == torch.amax(x, axis, keepdim=True)
    return torch.where(is_largest, places, size - 1).amin(axis, keepdim=keep)


@_operator("TopK")
def _top_k(call: Call) -> tuple[Tensor, Tensor]:
    """In descending order; of equal ones the first."""
    (count,) = call.numbers(1) or []
    if not (call.get("largest", 1) and call.get("sorted", 1)):
        raise ValueError("TopK of the smallest, or unsorted, is not implemented")
    axis = call.get("axis", -1)
    values, places = torch.sort(call.x(), stable=True, dim=axis, descending=True)
    return values.narrow(axis, 0, count), places.narrow(axis, 0, count)


# -------------------------------------------------------------------------------- functions
@_operator("Softmax")
def _softmax(call: Call) -> Tensor:
    return torch.softmax(call.x(), call.get("axis", -1))


@_operator("LogSoftmax")
def _log_softmax(call: Call) -> Tensor:
    return torch.log_softmax(call.x(), call.get("axis", -1))


@_operator("Swish")
def _swish(call: Call) -> Tensor:
    wide = call.x().float()
    return (wide * torch.sigmoid(wide * call.get("alpha", 1.0))).to(call.x().dtype)


@_operator("Gelu")
def _gelu(call: Call) -> Tensor:
    return functional.gelu(call.x(), approximate=_text(call.get("approximate", "none")))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@_operator("Clip")
def _clip(call: Call) -> Tensor:
    x = call.x()
    x = torch.maximum(x, call.x(1)) if call.has(1) else x
    return torch.minimum(x, call.x(2)) if call.has(2) else x


@_operator("RMSNormalization")
def _rms_normalization(call: Call) -> Tensor:
    x, scale = call.x(), call.x(1)
    axes = tuple(range(call.get("axis", -1) % x.dim(), x.dim()))
    wide = x.float()
    mean = wide.square().mean(axes, keepdim=True)
    return (wide * torch.rsqrt(mean + call.get("epsilon", 1e-5)) * scale).to(x.dtype)


@_operator("LayerNormalization")
def _layer_normalization(call: Call) -> Tensor:
    x, scale = call.x(), call.x(1)
    axes = tuple(range(call.get("axis", -1) % x.dim(), x.dim()))
    wide = x.float()
    wide = wide - wide.mean(axes, keepdim=True)
    mean = wide.square().mean(axes, keepdim=True)
    found = wide * torch.rsqrt(mean + call.get("epsilon", 1e-5)) * scale
    return (found + call.x(2) if call.has(2) else found).to(x.dtype)


@_operator("RotaryEmbedding")
def _rotary_embedding(call: Call) -> Tensor:
    """Of [B, S, heads * size] or [B, heads, S, size]; cos and sin are those of each token."""
    x, cos, sin = call.x(), call.x(1), call.x(2)
    if call.has(3):
        cos, sin = cos[call.x(3)], sin[call.x(3)]
    heads, shape = call.get("num_heads", 0), x.shape
    x = x.reshape(*shape[:2], heads, -1) if x.dim() == 3 else x.transpose(1, 2)
    size = call.get("rotary_embedding_dim", 0) or x.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    cos, sin = (each[..., : size // 2].unsqueeze(2).float() for each in (cos, sin))
    if call.get("interleaved", 0):
        real, imaginary = turned[..., ::2], turned[..., 1::2]
    else:
        real, imaginary = turned[..., : size // 2], turned[..., size // 2 :]
    parts = real * cos - imaginary * sin, real * sin + imaginary * cos
    if call.get("interleaved", 0):
        found = torch.stack(parts, -1).flatten(-2)
    else:
        found = torch.cat(parts, -1)
    found = torch.cat((found.to(x.dtype), rest), -1)
    return found.reshape(shape) if len(shape) == 3 else found.transpose(1, 2)


@_operator("Attention")
def _attention(call: Call) -> Tensor:
    """Of all tokens, without a cache; the softmax in float32."""
    if len(call.inputs) > 4 or call.num_outputs > 1 or call.get("softcap", 0.0):
        raise ValueError("Attention with a cache or a cap is not implemented")
    if call.get("is_causal", 0):
        raise ValueError("causal Attention is not implemented")
    given = [call.x(index) for index in range(3)]
    counts = [call.get("q_num_heads"), call.get("kv_num_heads"), call.get("kv_num_heads")]
    is_flat = given[0].dim() == 3
    if is_flat:
        apart = zip(given, counts, strict=True)
        given = [x.reshape(*x.shape[:2], count, -1).transpose(1, 2) for x, count in apart]
    q, k, v = given
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, 1) if group > 1 else each for each in (k, v))
    scale = call.get("scale") or 1 / math.sqrt(q.shape[-1])
    scores = _product(q * math.sqrt(scale), (k * math.sqrt(scale)).transpose(-1, -2)).float()
    if call.has(3):
        mask = call.x(3)
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(mask.logical_not(), -math.inf)
        else:
            scores = scores + mask
    found = _product(torch.softmax(scores, -1).to(q.dtype), v)
    return found.transpose(1, 2).flatten(2) if is_flat else found


# ---------------------------------------------------------------------------- quantization
def _spread(call: Call, scale: Tensor, like: Tensor) -> Tensor:
    """Scales for each number: one for all, one for each entry of an axis, or one for a block."""
    axis, block = call.get("axis", 1), call.get("block_size", 0)
    if block:
        return scale.repeat_interleave(block, axis)
    if scale.dim() == 1 and like.dim() > 1:
        shape = [1] * like.dim()
        shape[axis] = -1
        return scale.reshape(shape)
    return scale


@_operator("DequantizeLinear")
def _dequantize_linear(call: Call) -> Tensor:
    codes, scale = call.x(), call.x(1)
    wide = codes.float()
    if call.has(2):
        wide = wide - _spread(call, call.x(2).float(), codes)
    return (wide * _spread(call, scale.float(), codes)).to(scale.dtype)


@_operator("QuantizeLinear")
def _quantize_linear(call: Call) -> Tensor:
    x, scale = call.x(), call.x(1)
    dtype = call.x(2).dtype if call.has(2) else _dtype(call.get("output_dtype"))
    wide = x.float() / _spread(call, scale.float(), x)
    if dtype == torch.float8_e4m3fn:
        return wide.clamp(-_E4M3_MAX, _E4M3_MAX).to(dtype)
    if dtype != torch.int8:
        raise ValueError(f"QuantizeLinear to {dtype} is not implemented")
    codes = wide.round()
    if call.has(2):
        codes = codes + _spread(call, call.x(2).float(), x)
    return codes.clamp(-128, 127).to(dtype)


@_operator("TRT_FP4DynamicQuantize")
def _quantize_fp4(call: Call) -> tuple[Tensor, Tensor]:
    """NVFP4: E2M1 with scales in E4M3 of blocks of 16, which are multiples of a global one."""
    x, scale, size = call.x().float(), call.x(1), call.get("block_size")
    blocks = x.reshape(*x.shape[:-1], -1, size)
    wanted = blocks.abs().amax(-1) / _E2M1_MAX / scale
    scales = wanted.clamp(_E4M3_LEAST, _E4M3_MAX).to(torch.float8_e4m3fn)
    codes = _round_e2m1(blocks / (scales.float() * scale).unsqueeze(-1))
    return codes.reshape(x.shape), scales


def _round_e2m1(x: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with either sign; ties go to even codes."""
    size = x.abs().clamp(max=_E2M1_MAX)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign((size / step).round() * step, x)
