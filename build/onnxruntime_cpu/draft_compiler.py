"""Draft bundle to ONNX Runtime graphs: the decoder, and the graph that fuses features."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from edgellm import contract
from edgellm.build.lowering.linear_groups import LinearKernel
from edgellm.build.lowering.linear_weights import weight_kinds
from edgellm.build.lowering.round_int4 import round_to_int4
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.onnxruntime_cpu.compiler import (
    RUNTIME_BYTES,
    check_heads,
    check_quantize,
    close_rounded,
    float32_spec,
    linear_sizes,
    open_rounded,
    optimize,
    table_bytes,
)
from edgellm.build.onnxruntime_cpu.linears import (
    ALL_INPUTS,
    RowInt8Kernel,
    StoredKernel,
)
from edgellm.build.onnxruntime_cpu.lower import lower_decoder, lower_rowwise
from edgellm.build.plan import CompiledDraft, Estimate, Plan, Report
from edgellm.contract import DecoderSpec, DraftBundleManifest, PassGraph
from edgellm.device_runtime.pass_costs import draft_costs, features
from edgellm.device_runtime.runners.onnxruntime_cpu.processor import has_fast_int8
from edgellm.device_runtime.runners.onnxruntime_cpu.session import OnnxRuntimeDraftSession

_MODEL, _FUSE = "draft", "fuse"
CANDIDATES = 10  # of a row, while costs are measured


def compile_draft(
    bundle: Path, manifest: DraftBundleManifest, plan: Plan, folder: Path, report: Report
) -> CompiledDraft:
    """See `edgellm.build.backends.Backend.compile_draft`.

    A draft's precision changes how many tokens are accepted, never which: int8 is the default
    where the processor has int8 dot products.
    """
    spec = float32_spec(manifest.draft.decoder)
    check_heads(spec)
    kinds = weight_kinds(ir.load(bundle / "model.onnx"))
    check_quantize(kinds, plan.quantize)
    report("lowering the draft")
    rounded = open_rounded(folder, plan.quantize)
    model = _compile(bundle, folder, plan, spec, rounded)
    fuse = None
    if manifest.draft.fuses:
        fuse = compile_rowwise(
            bundle / "fuse.onnx", _FUSE, folder, plan, rounded,
            probe=partial(_fused, taps=features(manifest.draft, 5)),
        )  # fmt: skip
    close_rounded(rounded)
    report("measuring the cost of a draft step")
    runner = OnnxRuntimeDraftSession(model, fuse, spec, plan.kv_capacity)
    return CompiledDraft(
        graphs=(PassGraph(f"{_MODEL}.onnx", plan.max_input_len, precision(kinds, plan)),),
        fuse_graph=f"{_FUSE}.onnx" if fuse is not None else "",
        kv_dtype=spec.kv.dtype,
        step_cost_ms=draft_costs(runner, manifest.draft, fused=False),
        extend_cost_ms=draft_costs(runner, manifest.draft, fused=True),
    )


def estimate(bundle: Path, manifest: DraftBundleManifest, plan: Plan) -> Estimate:
    """See `edgellm.build.backends.Backend.estimate`."""
    model = ir.load(bundle / "model.onnx")
    linears = linear_sizes(model, plan.quantize)
    kind = "int8" if is_int8(plan) else "decode"
    read = sum(linears[kind].values())
    fuse = 0
    if manifest.draft.fuses:
        fuse = sum(linear_sizes(ir.load(bundle / "fuse.onnx"), plan.quantize)[kind].values())
    engine = table_bytes(model) + 2 * (read + fuse)
    return Estimate(
        engine_bytes=engine,
        kv_bytes=float32_spec(manifest.draft.decoder).kv.bytes_per_token * plan.kv_capacity,
        peak_build_bytes=RUNTIME_BYTES + engine + 3 * max(linears["dense"].values()),
        decode_bytes=read,
    )


def is_int8(plan: Plan) -> bool:
    """Whether weights are rounded to int8."""
    return plan.quantize == "int8" or (plan.quantize == "auto" and has_fast_int8())


def precision(kinds: set[str], plan: Plan) -> str:
    """What the weights become, by how the bundle stores them."""
    if is_int8(plan):
        return "int8"
    return "int4" if plan.quantize == "int4" else "+".join(sorted(kinds - {"dense"})) or "fp32"


def _kernel(plan: Plan) -> LinearKernel:
    # A draft's last bits decide nothing, its steps are many.
    return RowInt8Kernel(ALL_INPUTS) if is_int8(plan) else StoredKernel()


def _portable(path: Path, rounded: WeightFile | None) -> tuple[ir.Model, bool]:
    """A portable graph, and whether ONNX Runtime can keep it prepacked."""
    model = ir.load(path)
    if rounded is not None:
        round_to_int4(model, rounded)
    return model, weight_kinds(model) <= {"dense"}


def _compile(
    bundle: Path, folder: Path, plan: Plan, spec: DecoderSpec, rounded: WeightFile | None
) -> ort.InferenceSession:
    model, is_dense = _portable(bundle / "model.onnx", rounded)
    weights = WeightFile(folder / f"{_MODEL}.lowered.data")
    lower_decoder(model, plan.kv_capacity, _kernel(plan), weights)
    weights.close()
    lowered = folder / f"{_MODEL}.lowered.onnx"
    ir.save(model, lowered)

    def probe(session: ort.InferenceSession) -> np.ndarray:
        runner = OnnxRuntimeDraftSession(session, None, spec, plan.kv_capacity)
        rows = min(5, plan.kv_capacity)
        hidden = np.random.default_rng(0).standard_normal((rows, spec.hidden_size), np.float32)
        result = runner.run(np.arange(rows), hidden, 0, np.arange(rows), top_k=1)
        return np.concatenate([result.log_probs, result.hidden], axis=1)

    return optimize(
        lowered, folder / f"{_MODEL}.onnx", plan.threads, prepacks=is_dense or is_int8(plan),
        probe=probe,
    )  # fmt: skip


def compile_rowwise(
    graph: Path,
    name: str,
    folder: Path,
    plan: Plan,
    rounded: WeightFile | None,
    *,
    probe: Callable[[ort.InferenceSession], np.ndarray],
) -> ort.InferenceSession:
    """Lower a graph without cache and attention, and let ONNX Runtime keep it as `name`.onnx."""
    model, is_dense = _portable(graph, rounded)
    weights = WeightFile(folder / f"{name}.lowered.data")
    lower_rowwise(model, _kernel(plan), weights)
    weights.close()
    lowered = folder / f"{name}.lowered.onnx"
    ir.save(model, lowered)

    return optimize(
        lowered, folder / f"{name}.onnx", plan.threads, prepacks=is_dense or is_int8(plan),
        probe=probe,
    )  # fmt: skip


def _fused(session: ort.InferenceSession, taps: np.ndarray) -> np.ndarray:
    (hidden,) = session.run(None, {contract.HIDDEN_TAPS: taps[None]})
    return np.asarray(hidden)
