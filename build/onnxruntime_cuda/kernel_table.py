"""Table of the CUDA kernels that lowered graphs may use, and a check of graphs.

A node without a CUDA kernel would run on the CPU, between copies of its inputs and outputs. A
session on CUDA rejects such a graph; a build rejects it earlier.

Source: docs/OperatorKernels.md of ONNX Runtime, section CUDAExecutionProvider, at commit
001d12d2623f (2026, opset 25), for the opsets that `lowering.finish` declares; which inputs lie in
the host's memory is from the kernels' registrations. What GroupQueryAttention takes beside its
types is in `fused_attention.py`, QMoE in `integer_experts.py`, MatMulNBits on tensor cores in
`linears.py`. `python benchmarks/gpu.py provider` asks the released library itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from edgellm.core.errors import UnsupportedModelError
from edgellm.device_runtime.runners.onnxruntime_cuda.attention_inputs import HOST_INPUTS

_T = ir.DataType
_FLOATS = frozenset({_T.FLOAT, _T.FLOAT16})
_NUMBERS = _FLOATS | {_T.INT64, _T.INT32}
_ALL = _NUMBERS | {_T.BOOL, _T.UINT8, _T.INT8}
_BOOL = frozenset({_T.BOOL})
_INTEGERS = frozenset({_T.INT64})


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Registered types of an operator."""

    types: frozenset[ir.DataType]  # of the input that decides
    decides: int = 0
    host: tuple[int, ...] = ()  # inputs that lie in the host's memory
    gives: ir.DataType | None = None  # type of the outputs; None: that of the input that decides


KERNELS: Mapping[tuple[str, str], Kernel] = {
    ("", "Add"): Kernel(types=_NUMBERS),
    ("", "ArgMax"): Kernel(types=_FLOATS, gives=_T.INT64),
    ("", "Cast"): Kernel(types=_ALL),
    ("", "Clip"): Kernel(types=_FLOATS, host=(1, 2)),
    ("", "Concat"): Kernel(types=_ALL),
    ("", "Conv"): Kernel(types=_FLOATS),
    ("", "Cos"): Kernel(types=_FLOATS),
    ("", "Div"): Kernel(types=_NUMBERS),
    ("", "Exp"): Kernel(types=_FLOATS),
    ("", "Expand"): Kernel(types=_ALL, host=(1,)),
    ("", "Flatten"): Kernel(types=_ALL),
    ("", "Gather"): Kernel(types=_ALL),
    ("", "GatherElements"): Kernel(types=_ALL),
    ("", "Gelu"): Kernel(types=_FLOATS),
    ("", "Greater"): Kernel(types=_NUMBERS, gives=_T.BOOL),
    ("", "GreaterOrEqual"): Kernel(types=_NUMBERS, gives=_T.BOOL),
    ("", "LayerNormalization"): Kernel(types=_FLOATS),
    ("", "Log"): Kernel(types=_FLOATS),
    ("", "LogSoftmax"): Kernel(types=_FLOATS),
    ("", "MatMul"): Kernel(types=_FLOATS),
    ("", "Max"): Kernel(types=_NUMBERS),
    ("", "Min"): Kernel(types=_NUMBERS),
    ("", "Mul"): Kernel(types=_NUMBERS),
    ("", "OneHot"): Kernel(types=_INTEGERS, host=(1, 2), gives=_T.FLOAT),
    ("", "ReduceMax"): Kernel(types=_NUMBERS, host=(1,)),
    ("", "ReduceSum"): Kernel(types=_NUMBERS, host=(1,)),
    ("", "Reshape"): Kernel(types=_ALL, host=(1,)),
    ("", "ScatterND"): Kernel(types=_ALL),
    ("", "Shape"): Kernel(types=_ALL, gives=_T.INT64),
    ("", "Sigmoid"): Kernel(types=_FLOATS),
    ("", "SimplifiedLayerNormalization"): Kernel(types=_FLOATS),
    ("", "Sin"): Kernel(types=_FLOATS),
    ("", "Slice"): Kernel(types=_ALL, host=(1, 2, 3, 4)),
    ("", "Softmax"): Kernel(types=_FLOATS),
    ("", "Split"): Kernel(types=_ALL, host=(1,)),
    ("", "Squeeze"): Kernel(types=_ALL, host=(1,)),
    ("", "Sub"): Kernel(types=_NUMBERS),
    ("", "Tanh"): Kernel(types=_FLOATS),
    ("", "TopK"): Kernel(types=_NUMBERS, host=(1,)),
    ("", "Transpose"): Kernel(types=_ALL),
    ("", "Unsqueeze"): Kernel(types=_ALL, host=(1,)),
    ("", "Where"): Kernel(types=_NUMBERS | {_T.UINT8}, decides=1),
    ("com.microsoft", "FusedMatMul"): Kernel(types=_FLOATS),
    ("com.microsoft", "GroupQueryAttention"): Kernel(types=frozenset({_T.FLOAT16}), host=(6,)),
    ("com.microsoft", "MatMulNBits"): Kernel(types=_FLOATS),
    ("com.microsoft", "MoE"): Kernel(types=_FLOATS),
    ("com.microsoft", "MultiHeadAttention"): Kernel(types=_FLOATS),
    ("com.microsoft", "QMoE"): Kernel(types=frozenset({_T.FLOAT16})),
    ("com.microsoft", "QuickGelu"): Kernel(types=_FLOATS),
    ("com.microsoft", "RotaryEmbedding"): Kernel(types=_FLOATS),
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): Kernel(types=_FLOATS),
}


def check_kernels(model: ir.Model) -> None:
    """Check that CUDA computes every node, and that no node waits for the host.

    Raises:
        UnsupportedModelError: a node without a kernel for its type, or sizes that are computed.
    """
    graph = model.graph
    types = {value: value.dtype for value in (*graph.inputs, *graph.initializers.values())}
    on_host = {value for value in graph.inputs if value.name in HOST_INPUTS}
    for node in graph:
        kernel = KERNELS.get((node.domain, node.op_type))
        if kernel is None:
            raise _unsupported(f"{node.op_type} ({node.name}) has no CUDA kernel")
        value = node.inputs[kernel.decides]
        dtype = types.get(value) if value is not None else None
        if dtype not in kernel.types:
            raise _unsupported(f"{node.op_type} ({node.name}) has no CUDA kernel for {dtype}")
        for index, each in enumerate(node.inputs):
            if each is not None and (each in on_host) != (index in kernel.host):
                constant = each.name in graph.initializers
                if not constant:
                    raise _unsupported(f"{node.op_type} ({node.name}) computes with sizes")
        gives = kernel.gives or dtype
        if node.op_type == "Cast":
            gives = ir.DataType(node.attributes["to"].as_int())
        for output in node.outputs:
            types[output] = gives
        if node.op_type == "TopK":
            types[node.outputs[1]] = ir.DataType.INT64
        if node.op_type == "Shape":
            on_host.add(node.outputs[0])


def _unsupported(fault: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"this graph cannot run on ONNX Runtime's CUDA provider: {fault}",
        hint="build with --device cpu, or --backend tensorrt",
    )
