"""Bundle to graphs for ONNX Runtime's CUDA provider; measured where there is a GPU.

Nothing is folded or prepacked, so engines can be built on a machine without a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import onnx_ir as ir

from edgellm.build.lowering.linear_weights import LinearWeight, weight_kinds
from edgellm.build.lowering.round_int4 import BLOCK_SIZE as INT4_BLOCK
from edgellm.build.lowering.round_int4 import round_to_int4
from edgellm.build.lowering.weights import WeightFile, parameter_name
from edgellm.build.onnxruntime_cpu.compiler import (
    RUNTIME_BYTES,
    best_prefill_rows,
    check_quantize,
    close_rounded,
    open_rounded,
)
from edgellm.build.onnxruntime_cuda.attention import rows_graph
from edgellm.build.onnxruntime_cuda.linears import CudaKernel, dense_name
from edgellm.build.onnxruntime_cuda.lower import lower_for_cuda
from edgellm.build.plan import (
    Compiled,
    CompiledDraft,
    CompiledVisual,
    Estimate,
    Plan,
    Report,
    VisualPlan,
)
from edgellm.contract import (
    BundleManifest,
    DecoderSpec,
    DraftBundleManifest,
    EdgeLLMError,
    KVCacheSpec,
    PassGraph,
    VisualBundleManifest,
)
from edgellm.device_runtime.gpu import memory_bytes
from edgellm.device_runtime.pass_costs import draft_costs, fastest_ms, features, pass_costs
from edgellm.device_runtime.runners.onnxruntime_cuda import provider as cuda
from edgellm.device_runtime.runners.onnxruntime_cuda.cuda_session import (
    DeviceDraftSession,
    DeviceSession,
)
from edgellm.device_runtime.runners.onnxruntime_graphs import ROWS_GRAPH, load_graph
from edgellm.device_runtime.runners.onnxruntime_heads import OnnxRuntimeHeads

_BASE, _DRAFT, _FUSE, _HEADS, _ENCODER = "llm", "draft", "fuse", "heads", "encoder"
_INT8_BLOCK = 32
PREFILL_ROWS = 256  # where nothing is measured: scores of a pass are a matrix
_NOT_MEASURED = "there is no CUDA here: the engine was not run and nothing was measured"
_NO_FP8 = "FP8 weights became int8 in blocks of 32: ONNX Runtime's CUDA products do not take FP8"

Measured = TypeVar("Measured")
_Manifest = BundleManifest | DraftBundleManifest | VisualBundleManifest


def compile_base(
    bundle: Path, manifest: BundleManifest, plan: Plan, folder: Path, report: Report
) -> Compiled:
    """See `edgellm.build.backends.Backend.compile`."""
    spec = _engine_spec(manifest.decoder, manifest, plan)
    built = _Builder(bundle, manifest, plan.quantize, folder, report)
    path = built.lower("model", _BASE, plan.kv_capacity)
    ir.save(rows_graph(spec.kv, plan.kv_capacity), folder / ROWS_GRAPH)
    built.close()
    most = max(plan.max_input_len, plan.max_verify_tree_size)
    prefill = min(PREFILL_ROWS, plan.max_input_len)

    def measure(device: str) -> tuple[dict[str, float], int]:
        graph, rows = (
            load_graph(each, threads=plan.threads, optimize=False, device=device)
            for each in (path, folder / ROWS_GRAPH)
        )
        session = DeviceSession(graph, rows, spec, plan.kv_capacity, device)
        return pass_costs(session, spec), best_prefill_rows(session, spec, plan)

    costs, prefill = built.measure(measure, "the cost of a pass", ({}, prefill))
    graphs = (PassGraph(path.name, most, built.precision),)
    return Compiled(graphs, spec.kv.dtype, costs, prefill, tuple(built.notes))


def compile_draft(
    bundle: Path, manifest: DraftBundleManifest, plan: Plan, folder: Path, report: Report
) -> CompiledDraft:
    """See `edgellm.build.backends.Backend.compile_draft`."""
    draft = manifest.draft
    spec = _engine_spec(draft.decoder, manifest, plan)
    quantize = "none" if plan.quantize == "auto" else plan.quantize
    built = _Builder(bundle, manifest, quantize, folder, report)
    if draft.num_heads:
        return _compile_heads(built, manifest, plan, spec)
    path = built.lower("model", _DRAFT, plan.kv_capacity)
    fuse = built.lower("fuse", _FUSE) if draft.fuses else None
    built.close()

    def measure(device: str) -> tuple[dict[str, float], dict[str, float]]:
        graphs = [
            load_graph(each, threads=plan.threads, optimize=False, device=device) if each else None
            for each in (path, fuse)
        ]
        assert graphs[0] is not None
        session = DeviceDraftSession(graphs[0], graphs[1], spec, plan.kv_capacity, device)
        fused = draft_costs(session, draft, fused=True)
        return draft_costs(session, draft, fused=False), fused

    steps, extensions = built.measure(measure, "the cost of a draft step", ({}, {}))
    return CompiledDraft(
        graphs=(PassGraph(path.name, plan.max_input_len, built.precision),),
        fuse_graph=fuse.name if fuse is not None else "",
        kv_dtype=spec.kv.dtype,
        step_cost_ms=steps,
        extend_cost_ms=extensions,
        notes=tuple(built.notes),
    )


def _compile_heads(
    built: _Builder, manifest: DraftBundleManifest, plan: Plan, spec: DecoderSpec
) -> CompiledDraft:
    path = built.lower("model", _HEADS)
    built.close()
    feature = features(manifest.draft, 1)[0, : manifest.draft.base_hidden_size]

    def measure(device: str) -> dict[str, float]:
        graph = load_graph(path, threads=plan.threads, optimize=False, device=device)
        run = partial(OnnxRuntimeHeads(graph).candidates, feature, 1)
        return {"1": fastest_ms(run, 7)}

    return CompiledDraft(
        graphs=(PassGraph(path.name, 1, built.precision),),
        fuse_graph="",
        kv_dtype=spec.kv.dtype,
        step_cost_ms={},
        extend_cost_ms=built.measure(measure, "the cost of the heads", {}),
        notes=tuple(built.notes),
    )


def compile_encoder(
    bundle: Path, manifest: VisualBundleManifest, plan: VisualPlan, folder: Path, report: Report
) -> CompiledVisual:
    """See `edgellm.build.backends.Backend.compile_visual`."""
    built = _Builder(bundle, manifest, plan.quantize, folder, report)
    path = built.lower("model", _ENCODER)
    built.close()

    def measure(device: str) -> None:
        load_graph(path, threads=plan.threads, optimize=False, device=device)

    built.measure(measure, "whether the encoder loads", None)
    return CompiledVisual(path.name, built.precision, tuple(built.notes))


class _Builder:
    """Lowers the graphs of one bundle into a folder."""

    def __init__(
        self, bundle: Path, manifest: _Manifest, quantize: str, folder: Path, report: Report
    ) -> None:
        self._bundle, self._folder, self._report = bundle, folder, report
        self._quantize = quantize
        self._dtype = ir.DataType[_dtype(manifest)]
        kinds = weight_kinds(ir.load(bundle / "model.onnx"))
        check_quantize(kinds, quantize)
        stored = "+".join(sorted(kinds - {"dense"})) or _short(self._dtype)
        self.precision = quantize if quantize in ("int4", "int8") else stored
        self.notes = [_NO_FP8] if "fp8" in kinds else []
        self._rounded = open_rounded(folder, quantize)

    def lower(self, source: str, name: str, capacity: int = 0) -> Path:
        """Write the graph and its weights; the graph's path."""
        self._report(f"lowering the {name} graph for CUDA")
        model = ir.load(self._bundle / f"{source}.onnx")
        if self._rounded is not None:
            round_to_int4(model, self._rounded)
        weights = WeightFile(self._folder / f"{name}.data")
        kernel = CudaKernel(self._dtype, rounds=self._quantize == "int8")
        lower_for_cuda(model, kernel, weights, self._dtype, capacity)
        weights.close()
        path = self._folder / f"{name}.onnx"
        ir.save(model, path)
        return path

    def close(self) -> None:
        """All graphs are written."""
        close_rounded(self._rounded)

    def measure(self, run: Callable[[str], Measured], what: str, otherwise: Measured) -> Measured:
        """What `run` finds on the device; `otherwise` where there is none, with a note."""
        try:
            device = cuda.require_cuda()
        except EdgeLLMError as error:
            self.notes.append(f"{_NOT_MEASURED}: {error}")
            return otherwise
        self._report(f"measuring {what}")
        return run(device)


def _dtype(manifest: _Manifest) -> str:
    return {"float16": "FLOAT16", "float32": "FLOAT"}[manifest.dtype]


def _short(dtype: ir.DataType) -> str:
    return "fp16" if dtype == ir.DataType.FLOAT16 else "fp32"


def _engine_spec(spec: DecoderSpec, manifest: _Manifest, plan: Plan) -> DecoderSpec:
    """With a cache in the activations' type; raises `EdgeLLMError` for what CUDA has not."""
    if plan.kv_cache == "int8":
        raise EdgeLLMError(
            "--kvCache int8 is for the CPU: on CUDA the cache has the activations' type",
            hint="leave --kvCache away",
        )
    if plan.prefill == "int8":
        raise EdgeLLMError(
            "--prefill int8 is for the CPU: ONNX Runtime has no int8 products for CUDA",
            hint="leave --prefill away",
        )
    return dataclasses.replace(spec, kv=dataclasses.replace(spec.kv, dtype=manifest.dtype))


def estimate(bundle: Path, manifest: BundleManifest | DraftBundleManifest, plan: Plan) -> Estimate:
    """See `edgellm.build.backends.Backend.estimate`."""
    decoder = manifest.decoder if isinstance(manifest, BundleManifest) else manifest.draft.decoder
    spec = _engine_spec(decoder, manifest, plan)
    has_fuse = isinstance(manifest, DraftBundleManifest) and manifest.draft.fuses
    names = ("model", "fuse") if has_fuse else ("model",)
    return _estimate(bundle, names, manifest, plan.quantize, plan.kv_capacity, spec.kv)


def estimate_visual(bundle: Path, manifest: VisualBundleManifest, plan: VisualPlan) -> Estimate:
    """See `edgellm.build.backends.Backend.estimate_visual`."""
    return _estimate(bundle, ("model",), manifest, plan.quantize)


def _estimate(
    bundle: Path,
    names: tuple[str, ...],
    manifest: _Manifest,
    quantize: str,
    capacity: int = 0,
    cache: KVCacheSpec | None = None,
) -> Estimate:
    dtype = ir.DataType[_dtype(manifest)]
    rope = int(dtype.itemsize * capacity * cache.head_dim) if cache is not None else 0
    linears: dict[str, int] = {}
    tables: dict[str, int] = {}
    largest = 0
    for name in names:
        for node in ir.load(bundle / f"{name}.onnx").graph:
            weight = LinearWeight.of(node.inputs[1]) if node.op_type == "MatMul" else None
            if weight is not None:
                key, size = _stored(weight, f"{name}.{node.name}", dtype, quantize)
                linears[key] = size
                largest = max(largest, weight.count)
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
