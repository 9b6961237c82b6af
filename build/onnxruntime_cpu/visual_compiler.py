"""Visual bundle to ONNX Runtime graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from edgellm import contract
from edgellm.build.lowering.linear_groups import LinearKernel
from edgellm.build.lowering.linear_weights import weight_keys
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.onnxruntime_cpu.compiler import (
    RUNTIME_BYTES,
    check_quantize,
    linear_sizes,
    optimize,
)
from edgellm.build.onnxruntime_cpu.linears import RowInt8Kernel, StoredKernel
from edgellm.build.onnxruntime_cpu.lower import lower_visual
from edgellm.build.plan import CompiledVisual, Estimate, Report, VisualPlan
from edgellm.contract import VisionSpec, VisualBundleManifest
from edgellm.device_runtime.runners.onnxruntime_encoder import OnnxRuntimeVisualSession
from edgellm.multimodal.grids import grid_inputs

_NAME = "encoder"


def compile_encoder(
    bundle: Path, manifest: VisualBundleManifest, plan: VisualPlan, folder: Path, report: Report
) -> CompiledVisual:
    """See `edgellm.build.backends.Backend.compile_visual`."""
    model = ir.load(bundle / "model.onnx")
    precision, kernel, prepacks = _choose(model, plan.quantize)
    report("lowering the encoder")
    weights = WeightFile(folder / f"{_NAME}.lowered.data")
    lower_visual(model, kernel, weights)
    weights.close()
    lowered = folder / f"{_NAME}.lowered.onnx"
    ir.save(model, lowered)
    report("optimizing and prepacking the encoder")
    inputs = _sample(manifest.vision)

    def probe(session: ort.InferenceSession) -> np.ndarray:
        embeds, deepstack = OnnxRuntimeVisualSession(session).encode(inputs)
        return np.concatenate([embeds, *deepstack])

    optimize(lowered, folder / f"{_NAME}.onnx", plan.threads, prepacks=prepacks, probe=probe)
    return CompiledVisual(f"{_NAME}.onnx", precision)


def _choose(model: ir.Model, quantize: str) -> tuple[str, LinearKernel, bool]:
    """Precision and kernel of the linear layers, and whether their weights stay prepacked.

    An image has many rows: what is stored as int8 with a scale for each column is multiplied as
    such, other quantized weights in the blocks that a language model's single tokens take.
    """
    keys = weight_keys(model)
    check_quantize({kind for kind, _ in keys}, quantize)
    if quantize == "int8":
        return "int8", RowInt8Kernel(), True
    quantized = {key for key in keys if key[0] != "dense"}
    if quantized == {("int8", 0)}:
        return "int8", StoredKernel(RowInt8Kernel()), True
    precision = "+".join(sorted({kind for kind, _ in quantized})) or "fp32"
    return precision, StoredKernel(), not quantized


def estimate(bundle: Path, manifest: VisualBundleManifest, plan: VisualPlan) -> Estimate:
    """See `edgellm.build.backends.Backend.estimate_visual`."""
    del manifest
    sizes = linear_sizes(ir.load(bundle / "model.onnx"), plan.quantize)
    weights = sum(sizes["int8" if plan.quantize == "int8" else "decode"].values())
    engine = 2 * weights  # as they were, and as the kernels read them
    largest = max(sizes["dense"].values())
    return Estimate(engine, 0, RUNTIME_BYTES + engine + 3 * largest, weights)


def _sample(spec: VisionSpec) -> dict[str, np.ndarray]:
    """An image of noise: two tiles, or a grid that has windows of several sizes."""
    random = np.random.default_rng(0)
    if spec.image_size:
        shape = (2, 3, spec.image_size, spec.image_size)
        return {contract.PIXEL_VALUES: random.standard_normal(shape, np.float32)}
    side = max(spec.window_size, spec.merge_size)
    rows, columns = side + spec.merge_size, 2 * side
    pixels = random.standard_normal((rows * columns, spec.patch_values), np.float32)
    return {contract.PIXEL_VALUES: pixels, **grid_inputs(rows, columns, spec)}
