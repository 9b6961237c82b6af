"""Bundle of Medusa heads to one ONNX Runtime graph."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from edgellm.build.onnxruntime_cpu.compiler import (
    check_quantize,
    close_rounded,
    float32_spec,
    open_rounded,
    weight_kinds,
)
from edgellm.build.onnxruntime_cpu.draft_compiler import (
    CANDIDATES,
    compile_rowwise,
    precision,
)
from edgellm.build.plan import CompiledDraft, Plan, Report
from edgellm.contract import DraftBundleManifest, PassGraph
from edgellm.device_runtime.pass_costs import heads_costs
from edgellm.device_runtime.runners.onnxruntime_heads import OnnxRuntimeHeads

_NAME = "heads"


def compile_heads(
    bundle: Path, manifest: DraftBundleManifest, plan: Plan, folder: Path, report: Report
) -> CompiledDraft:
    """See `edgellm.build.backends.Backend.compile_draft`; a tree takes no other pass."""
    spec, portable = manifest.draft, bundle / "model.onnx"
    kinds = weight_kinds(ir.load(portable))
    check_quantize(kinds, plan.quantize)
    report("lowering the heads")
    feature = np.random.default_rng(1).standard_normal(spec.base_hidden_size, np.float32)
    rounded = open_rounded(folder, plan.quantize)
    session = compile_rowwise(
        portable, _NAME, folder, plan, rounded, probe=partial(_best, feature=feature)
    )
    close_rounded(rounded)
    report("measuring the cost of the heads")
    top_k = min(CANDIDATES, spec.draft_vocab_size)
    return CompiledDraft(
        graphs=(PassGraph(f"{_NAME}.onnx", 1, precision(kinds, plan)),),
        fuse_graph="",
        kv_dtype=float32_spec(spec.decoder).kv.dtype,
        step_cost_ms={},
        extend_cost_ms=heads_costs(OnnxRuntimeHeads(session), spec, top_k),
    )


def _best(session: ort.InferenceSession, feature: np.ndarray) -> np.ndarray:
    """The heads' largest log-probabilities [N, 1]."""
    _, log_probs = OnnxRuntimeHeads(session).candidates(feature, 1)
    return log_probs
