"""The graph that updates the states of recurrent layers: small, without weights."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from edgellm.build.lowering.weights import WeightFile
from edgellm.build.onnxruntime_cpu.linears import StoredKernel
from edgellm.build.onnxruntime_cpu.lower import lower
from edgellm.build.onnxruntime_cpu.optimize import optimize
from edgellm.core.graph_roles import COMMIT
from edgellm.core.manifest import GraphSpec
from edgellm.device_runtime.runners.onnxruntime_cpu.runner import (
    LoadedGraph,
    OnnxRuntimeRunner,
    open_runner,
)


def compile_commit(
    portable: Path, folder: Path, threads: int, *, own_kernels: bool
) -> tuple[OnnxRuntimeRunner, GraphSpec]:
    """Compile the graph into `folder`; the decoder's check covers it, too."""
    path = folder / f"{COMMIT}.lowered.onnx"
    weights = WeightFile(path.with_suffix(".data"), lambda _: None)
    model = ir.load(portable)
    lower(model, StoredKernel(), weights, own_kernels=own_kernels)
    weights.close()
    ir.save(model, path)
    name = f"{COMMIT}.onnx"
    made = optimize(path, folder / name, threads, prepacks=False, own_kernels=own_kernels)
    return open_runner([LoadedGraph(made)]), GraphSpec(name, 0, "fp32")
