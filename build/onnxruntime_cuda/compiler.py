"""Bundle to graphs for ONNX Runtime's CUDA provider; measured where there is a GPU.

Nothing is folded or prepacked, so engines can be built on a machine without a GPU.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import onnx_ir as ir

from edgellm.build.costs import Costs, measure
from edgellm.build.lowering.linear_weights import LinearWeight, linear_layers, weight_kinds
from edgellm.build.lowering.round_int4 import BLOCK_SIZE as INT4_BLOCK
from edgellm.build.lowering.round_int4 import check_quantize, load_portable, rounded_weights
from edgellm.build.lowering.weights import WeightFile, parameter_name
from edgellm.build.onnxruntime_cuda.attention import rows_graph
from edgellm.build.onnxruntime_cuda.linears import CudaKernel, dense_name
from edgellm.build.onnxruntime_cuda.lower import lower_for_cuda
from edgellm.build.plan import RUNTIME_BYTES, Compiled, Estimate, Plan, Report
from edgellm.contract import EdgeLLMError
from edgellm.device_runtime.gpu import memory_bytes
from edgellm.device_runtime.runners.onnxruntime_cuda import open_graphs, provider
from edgellm.device_runtime.runners.onnxruntime_cuda.slots import ROWS_GRAPH
from edgellm.manifest import (
    DECODER,
    DRAFT,
    HEADS,
    Bundle,
    GraphSpec,
    KVCacheSpec,
    Spec,
    with_kv_dtype,
)

_INT8_BLOCK = 32
PREFILL_ROWS = 256  # where nothing is measured: scores of a pass are a matrix
_NOT_MEASURED = "there is no CUDA here: the engine was not run and nothing was measured"
_NO_FP8 = "FP8 weights became int8 in blocks of 32: ONNX Runtime's CUDA products do not take FP8"
_NAMES = {DECODER: "llm"}  # of files, where they are not the role's


def compile_bundle(
    source: Path, bundle: Bundle, plan: Plan, folder: Path, report: Report
) -> Compiled:
    """See `edgellm.build.backends.Backend.compile`."""
    cache = _cache(bundle, plan)
    quantize = _quantize(bundle, plan)
    kinds = weight_kinds(ir.load(source / next(iter(bundle.graphs.values())).path))
    check_quantize(kinds, quantize)
    dtype = _dtype(bundle)
    stored = "+".join(sorted(kinds - {"dense"})) or _short(dtype)
    precision = quantize if quantize in ("int4", "int8") else stored
    kernel = CudaKernel(dtype, rounds=quantize == "int8")
    graphs: dict[str, tuple[GraphSpec, ...]] = {}
    with rounded_weights(folder, quantize) as rounded:
        for role, graph in bundle.graphs.items():
            name = _NAMES.get(role, role)
            report(f"lowering the {name} graph for CUDA")
            model, weights = load_portable(source / graph.path, rounded), _weights(folder, name)
            capacity = plan.kv_capacity if role in (DECODER, DRAFT) else 0
            lower_for_cuda(model, kernel, weights, dtype, capacity)
            weights.close()
            ir.save(model, folder / f"{name}.onnx")
            graphs[role] = (GraphSpec(f"{name}.onnx", _max_rows(role, plan), precision),)
    if cache is not None and DECODER in graphs:
        ir.save(rows_graph(cache, plan.kv_capacity), folder / ROWS_GRAPH)
    notes = [_NO_FP8] if "fp8" in kinds else []
    spec = with_kv_dtype(bundle.spec, bundle.dtype if cache is not None else "")
    costs, prefill_rows = _measure(folder, graphs, spec, plan, report, notes)
    return Compiled(
        graphs, cache.dtype if cache is not None else "", costs, prefill_rows, tuple(notes)
    )


def _weights(folder: Path, name: str) -> WeightFile:
    return WeightFile(folder / f"{name}.data")


def _max_rows(role: str, plan: Plan) -> int:
    if role == DECODER:
        return max(plan.max_input_len, plan.max_verify_tree_size)
    return 1 if role == HEADS else plan.max_input_len


def _measure(
    folder: Path,
    graphs: dict[str, tuple[GraphSpec, ...]],
    spec: Spec,
    plan: Plan,
    report: Report,
    notes: list[str],
) -> tuple[Costs, int]:
    """Costs on the device, whose graphs are loaded in any case; none where none is, with a note."""
    try:
        device = provider.require_cuda()
    except EdgeLLMError as error:
        notes.append(f"{_NOT_MEASURED}: {error}")
        return {}, min(PREFILL_ROWS, plan.max_input_len)
    report("measuring the cost of a pass")
    opened = open_graphs(folder, graphs, spec, plan.kv_capacity, plan.threads, device)
    return measure(opened, spec, plan)


def _quantize(bundle: Bundle, plan: Plan) -> str:
    """What "auto" means here: there are no products of int8 for CUDA that a draft would gain by."""
    return "none" if plan.quantize == "auto" and DECODER not in bundle.graphs else plan.quantize


def _dtype(bundle: Bundle) -> ir.DataType:
    return ir.DataType[{"float16": "FLOAT16", "float32": "FLOAT"}[bundle.dtype]]


def _short(dtype: ir.DataType) -> str:
    return "fp16" if dtype == ir.DataType.FLOAT16 else "fp32"


def _cache(bundle: Bundle, plan: Plan) -> KVCacheSpec | None:
    """In the activations' type; raises `EdgeLLMError` for what CUDA has not."""
    if plan.kv_cache == "int8":
        raise EdgeLLMError(
            "--kvCache int8 is for the CPU: on CUDA the cache has the activations' type",
            hint="leave out --kvCache",
        )
    if plan.prefill == "int8":
        raise EdgeLLMError(
            "--prefill int8 is for the CPU: ONNX Runtime has no int8 products for CUDA",
            hint="leave out --prefill",
        )
    cache = bundle.cache
    return dataclasses.replace(cache, dtype=bundle.dtype) if cache is not None else None


def estimate(source: Path, bundle: Bundle, plan: Plan) -> Estimate:
    """See `edgellm.build.backends.Backend.estimate`."""
    cache, dtype = _cache(bundle, plan), _dtype(bundle)
    capacity = plan.kv_capacity
    rope = int(dtype.itemsize * capacity * cache.head_dim) if cache is not None else 0
    linears: dict[str, int] = {}
    tables: dict[str, int] = {}
    largest = 0
    for role, graph in bundle.graphs.items():
        portable = ir.load(source / graph.path).graph
        for node, weight in linear_layers(portable):
            key, size = _stored(weight, f"{role}.{node.name}", dtype, plan.quantize)
            linears[key] = size
            largest = max(largest, weight.count)
        for node in portable:
            table = node.inputs[0] if node.op_type == "Gather" else None
            tensor = table.const_value if table is not None else None
            if table is not None and tensor is not None and tensor.dtype.is_floating_point():
                key = f"{parameter_name(table)}.{dtype.name.lower()}"
                tables[key] = int(tensor.size * dtype.itemsize)
    engine = sum({**tables, **linears}.values())
    return Estimate(
        engine_bytes=engine + rope,
        kv_bytes=cache.bytes_per_token * capacity if cache is not None else 0,
        peak_build_bytes=RUNTIME_BYTES + 12 * largest,
        decode_bytes=sum(linears.values()),
        runs_on_cpu=False,
        device_bytes=memory_bytes(),
    )


def _stored(weight: LinearWeight, name: str, dtype: ir.DataType, quantize: str) -> tuple[str, int]:
    """Name and bytes of a linear weight in the engine."""
    itemsize = int(dtype.itemsize)
    if weight.kind != "dense":
        bits, block = weight.packing
    elif quantize == "int4":
        bits, block = 4, INT4_BLOCK
    elif quantize == "int8":
        bits, block = 8, _INT8_BLOCK
    else:
        return dense_name(weight, dtype), itemsize * weight.count
    return name, weight.count * bits // 8 + itemsize * weight.count // block
