"""ONNX operators that the parser of each TensorRT supports, with types and ranks.

Sources. TensorRT 10.3: `docs/operators.md` and `onnxOpImporters.cpp` of onnx/onnx-tensorrt at
96e7811 (10.1; release notes of 10.2 and 10.3 name no operator that our graphs have). What came
later, by release notes and headers: FP4 and its quantization 10.8; `Attention` 10.14;
`RMSNormalization`, `RotaryEmbedding` and `TensorScatter` 10.15; `Swish` 11.0. Where a document and
the importer's source say different things, the table has what the stricter one says. TensorRT 10.13
is not documented apart: it has what 10.3 has, and FP4. `docs/tensorrt.md` says which
JetPack has which.

Scales of blocks, by `IDequantizeLayer` in NvInfer.h: INT4 alone up to 10.12, FP8 and FP4 from 10.13
on (FP4 by release notes from 10.8 on), INT8 in none up to 11.1. NVIDIA's guide names blocks of 64
and 128 for INT4, which must have some (`int4_blocks.py`), and FP4's are 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from edgellm.build.tensorrt.lowering.int4_blocks import TAKEN
from edgellm.device_runtime.runners.tensorrt.library.trt_import import BROKEN_PLUGINS, OLDEST

Version = tuple[int, int]  # major, minor

FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
INTEGERS = frozenset({ir.DataType.INT32, ir.DataType.INT64})
NUMBERS = FLOATS | INTEGERS
BOOL = frozenset({ir.DataType.BOOL})
ANY = NUMBERS | BOOL
EIGHT_BITS = frozenset({ir.DataType.INT8, ir.DataType.FLOAT8E4M3FN})
FOUR_BITS = frozenset({ir.DataType.INT4})
FP4 = frozenset({ir.DataType.FLOAT4E2M1})
_CODES = EIGHT_BITS | FOUR_BITS | FP4
_INT4_BLOCKS = {ir.DataType.INT4: frozenset(TAKEN)}
_FP4_BLOCKS = {ir.DataType.FLOAT4E2M1: frozenset({16})}
_FP8_BLOCKS = {ir.DataType.FLOAT8E4M3FN: frozenset[int]()}
_ALL_RANKS = frozenset(range(9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Supported forms of an operator."""

    dtypes: frozenset[ir.DataType]  # of the inputs that `checked` names
    checked: tuple[int, ...] = (0,)
    ranks: frozenset[int] = _ALL_RANKS  # of the first input
    initializers: tuple[int, ...] = ()  # inputs that must be constants, if present
    attributes: Mapping[str, frozenset[object]] = field(default_factory=dict, hash=False)
    max_candidates: int = 0  # of TopK; 0: no limit
    blocked: Mapping[ir.DataType, frozenset[int]] = field(default_factory=dict, hash=False)
    """Supported block sizes by type of codes; empty: any."""


_ELEMENTWISE = Rule(dtypes=NUMBERS, checked=(0, 1))
_REDUCTION = Rule(dtypes=NUMBERS, initializers=(1,))
_UNARY = Rule(dtypes=FLOATS)
_MOVE = Rule(dtypes=ANY)

_SINCE_10_3: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "Add",
            "Sub",
            "Mul",
            "Div",
            "Min",
            "Max",
            "Equal",
            "Less",
            "LessOrEqual",
            "Greater",
            "GreaterOrEqual",
        ),
        _ELEMENTWISE,
    ),
    **dict.fromkeys(("And", "Or"), Rule(dtypes=BOOL, checked=(0, 1))),
    "Not": Rule(dtypes=BOOL),
    **dict.fromkeys(
        (
            "Cos",
            "Sin",
            "Exp",
            "Erf",
            "Log",
            "LogSoftmax",
            "Reciprocal",
            "Sigmoid",
            "Softplus",
            "Softmax",
            "Sqrt",
            "Tanh",
        ),
        _UNARY,
    ),
    **dict.fromkeys(("Abs", "Neg"), Rule(dtypes=NUMBERS)),
    **dict.fromkeys(
        (
            "Cast",
            "CastLike",
            "Concat",
            "Expand",
            "Identity",
            "Reshape",
            "Shape",
            "Split",
            "Transpose",
        ),
        _MOVE,
    ),
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"), _REDUCTION),
    **dict.fromkeys(("Squeeze", "Unsqueeze"), Rule(dtypes=ANY, initializers=(1,))),
    "ArgMax": Rule(dtypes=NUMBERS),
    # The document says so; the importer of 10.1 takes integers as well.
    "Clip": Rule(dtypes=FLOATS),
    "Conv": Rule(dtypes=FLOATS, ranks=frozenset({3, 4, 5})),
    "DequantizeLinear": Rule(
        dtypes=EIGHT_BITS | FOUR_BITS, initializers=(2,), blocked=_INT4_BLOCKS
    ),
    **dict.fromkeys(("Gather", "GatherElements"), Rule(dtypes=ANY)),
    "Gelu": _UNARY,
    "LayerNormalization": _UNARY,
    "MatMul": Rule(dtypes=FLOATS, checked=(0, 1)),
    "Pow": Rule(dtypes=FLOATS, checked=(0, 1)),
    "QuantizeLinear": Rule(dtypes=FLOATS, initializers=(2,)),
    "Range": Rule(dtypes=NUMBERS, checked=(0, 1, 2)),
    "ScatterElements": Rule(dtypes=NUMBERS),
    "ScatterND": Rule(dtypes=NUMBERS, attributes={"reduction": frozenset({"none"})}),
    "Slice": Rule(dtypes=ANY, initializers=(3,)),
    "TopK": Rule(dtypes=NUMBERS, attributes={"sorted": frozenset({1})}, max_candidates=3840),
    "Where": Rule(dtypes=ANY, checked=(1, 2)),
}

_SINCE_10_8 = {
    "DequantizeLinear": Rule(dtypes=_CODES, initializers=(2,), blocked=_INT4_BLOCKS | _FP4_BLOCKS),
    "trt::TRT_FP4DynamicQuantize": Rule(dtypes=FLOATS, ranks=frozenset({2, 3}), initializers=(1,)),
}
_SINCE_10_13 = {
    "DequantizeLinear": Rule(
        dtypes=_CODES, initializers=(2,), blocked=_INT4_BLOCKS | _FP4_BLOCKS | _FP8_BLOCKS
    ),
}
# An importer reshapes 3-D attention, and the document speaks of 4-D: 3-D is left to 11.x, where
# TensorRT-RTX compiles it.
_SINCE_10_14 = {"Attention": Rule(dtypes=FLOATS, checked=(0, 1, 2), ranks=frozenset({4}))}
_SINCE_10_15 = {
    "RMSNormalization": _UNARY,
    "RotaryEmbedding": Rule(dtypes=FLOATS, ranks=frozenset({3, 4})),
    "TensorScatter": Rule(
        dtypes=FLOATS, checked=(0, 1), ranks=frozenset({4}), attributes={"axis": frozenset({-2, 2})}
    ),
}
_SINCE_11_0 = {
    "Swish": _UNARY,
    "Attention": Rule(dtypes=FLOATS, checked=(0, 1, 2), ranks=frozenset({3, 4})),
    "Clip": Rule(dtypes=NUMBERS),  # compiled by TensorRT-RTX 1.7
}

# Compiled by TensorRT-RTX 1.7: experts have blocks of any size, FP4 of 16.
_AHEAD_OF_TIME = {
    "DequantizeLinear": Rule(
        dtypes=_CODES,
        initializers=(2,),
        blocked=dict.fromkeys(EIGHT_BITS | FOUR_BITS, frozenset[int]()) | _FP4_BLOCKS,
    ),
}

_HALF = frozenset({ir.DataType.FLOAT16})
_KERNELS = {
    "edgellm::store_rows": Rule(dtypes=_HALF, checked=(0, 1, 2, 3, 4), ranks=frozenset({3})),
    "edgellm::attend": Rule(dtypes=_HALF, ranks=frozenset({3})),
    "edgellm::finish": Rule(dtypes=_HALF, ranks=frozenset({3})),
    "edgellm::convolve_rows": Rule(dtypes=_HALF, checked=(0, 1), ranks=frozenset({3})),
    "edgellm::delta_rows": Rule(
        dtypes=frozenset({ir.DataType.FLOAT}), checked=(0, 1, 2, 3, 4), ranks=frozenset({3})
    ),
    "edgellm::route_rows": Rule(
        dtypes=frozenset({ir.DataType.FLOAT}), checked=(0, 1, 2, 3), ranks=frozenset({3})
    ),
    "edgellm::group_rows": Rule(dtypes=frozenset({ir.DataType.INT64}), ranks=frozenset({3})),
    "edgellm::expert_gates": Rule(dtypes=_HALF, ranks=frozenset({3})),
    "edgellm::expert_downs": Rule(dtypes=_HALF, checked=(0, 1), ranks=frozenset({3})),
    "edgellm::sum_experts": Rule(dtypes=_HALF, ranks=frozenset({3})),
    "edgellm::look_up_rows": Rule(dtypes=frozenset({ir.DataType.INT64}), ranks=frozenset({2})),
    "edgellm::head_rows": Rule(dtypes=_HALF, ranks=frozenset({3})),
}

_ADDED: tuple[tuple[Version, Mapping[str, Rule]], ...] = (
    (OLDEST, _SINCE_10_3),
    ((10, 8), _SINCE_10_8),
    ((10, 13), _SINCE_10_13),
    ((10, 14), _SINCE_10_14),
    ((10, 15), _SINCE_10_15),
    ((11, 0), _SINCE_11_0),
)
# The parser of 10.1 reads the opset and refuses none above its document's 20; 21 is the first with
# codes of 4 bits. 10.8 documents 22, and takes FP4, which is of 23.
_OPSETS: tuple[tuple[Version, int], ...] = (((10, 3), 21), ((10, 8), 23), ((10, 14), 24))

CHECKED: tuple[Version, ...] = ((10, 3), (10, 13), (10, 16), (11, 4))  # checked in CI


def rules(version: Version, *, ahead_of_time: bool = False) -> dict[str, Rule]:
    """Rules of a TensorRT version by operator; those of other domains are `domain::name`.

    Args:
        version: major and minor; of TensorRT-RTX those of the TensorRT whose operators it takes.
        ahead_of_time: for TensorRT-RTX, which has no plugins.

    Raises:
        ValueError: it is older than the table.
    """
    if version < OLDEST:
        raise ValueError(f"no table for TensorRT {version}")
    found: dict[str, Rule] = {}
    for since, added in _ADDED:
        if since <= version:
            found |= added
    if ahead_of_time:
        return found | _AHEAD_OF_TIME
    return found | (_KERNELS if takes_plugins(version) else {})


def takes_plugins(version: Version) -> bool:
    """Whether a TensorRT version supports plugins with edgellm's kernels."""
    return version not in BROKEN_PLUGINS


def highest_opset(version: Version) -> int:
    """The newest ONNX opset that a TensorRT version supports."""
    return max(opset for since, opset in _OPSETS if since <= version)


def first_version(operator: str) -> Version | None:
    """The first TensorRT of the table that supports an operator; None: none does."""
    return next((since for since, added in _ADDED if operator in added), None)


def first_with_weights(dtype: ir.DataType) -> Version:
    """The first TensorRT with weights of a type; raises `StopIteration` if there is none."""
    name = "DequantizeLinear"
    return next(s for s, added in _ADDED if name in added and dtype in added[name].dtypes)


def first_with_blocks(dtype: ir.DataType) -> Version:
    """As `first_with_weights`, for scales of blocks."""
    name = "DequantizeLinear"
    return next(s for s, added in _ADDED if name in added and dtype in added[name].blocked)


def lacking(version: Version) -> list[str]:
    """Operators of the newest TensorRT that this version lacks; they are rewritten."""
    return sorted(set(rules(_ADDED[-1][0])) - set(rules(version)) - set(_KERNELS))
