"""Bundle to ONNX Runtime engine: lower, optimize, prepack, measure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from edgellm import contract
from edgellm.build.costs import measure
from edgellm.build.lowering.round_int4 import load_portable, rounded_weights
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.onnxruntime_cpu.lower import lower
from edgellm.build.onnxruntime_cpu.memory_estimate import estimate_graphs
from edgellm.build.onnxruntime_cpu.options import kernels_of, notes_of
from edgellm.build.onnxruntime_cpu.own_linears import OwnLinears
from edgellm.build.onnxruntime_cpu.variants import Variant, variants_of
from edgellm.build.plan import Compiled, Estimate, Plan, Report
from edgellm.build.samples import held_inputs, sample_passes
from edgellm.contract import EdgeLLMError, UnsupportedModelError
from edgellm.device_runtime.kernels.library import register
from edgellm.device_runtime.kernels.pack import VERSION
from edgellm.device_runtime.runners.onnxruntime_cpu import EDGELLM, KERNELS, LAYOUT
from edgellm.device_runtime.runners.onnxruntime_cpu.runner import LoadedGraph, OnnxRuntimeRunner
from edgellm.device_runtime.runners.onnxruntime_graphs import load_graph, set_threads
from edgellm.manifest import (
    DECODER,
    DRAFT,
    ENCODER,
    Bundle,
    GraphSpec,
    KVCacheSpec,
    with_kv_dtype,
)

Numbers = list[dict[str, NDArray[Any]]]


def estimate(source: Path, bundle: Bundle, plan: Plan) -> Estimate:
    """See `edgellm.build.backends.Backend.estimate`."""
    return estimate_graphs(source, bundle, plan, _cache(bundle, plan))


def compile_bundle(
    source: Path, bundle: Bundle, plan: Plan, folder: Path, report: Report
) -> Compiled:
    """See `edgellm.build.backends.Backend.compile`."""
    cache = _cache(bundle, plan)
    graphs: dict[str, tuple[GraphSpec, ...]] = {}
    opened: dict[str, OnnxRuntimeRunner] = {}
    with rounded_weights(folder, plan.quantize) as rounded:
        for role, graph in bundle.graphs.items():
            own = cache if role in (DECODER, DRAFT) else None
            portable = source / graph.path
            variants = variants_of(role, ir.load(portable), bundle, plan)
            compiler = _Compiler(role, bundle, plan, folder, own)
            loaded = [compiler.compile(portable, each, rounded, report) for each in variants]
            opened[role] = OnnxRuntimeRunner(loaded, own, plan.kv_capacity)
            graphs[role] = tuple(
                GraphSpec(f"{each.name}.onnx", each.max_rows, each.precision) for each in variants
            )
    dtype = cache.dtype if cache is not None else ""
    report("measuring the cost of a pass")
    costs, prefill_rows = measure(opened, with_kv_dtype(bundle.spec, dtype), plan)
    own = ENCODER not in bundle.graphs  # whose layers stay with ONNX Runtime
    return Compiled(
        graphs, dtype, costs, prefill_rows, notes_of(plan) if own else (),
        _what_runs(plan) if own else {},
    )  # fmt: skip


def _what_runs(plan: Plan) -> dict[str, Any]:
    """Options of the engine, see `runners.onnxruntime_cpu`."""
    kernels = kernels_of(plan)
    return {KERNELS: kernels, **({LAYOUT: VERSION} if kernels == EDGELLM else {})}


def _cache(bundle: Bundle, plan: Plan) -> KVCacheSpec | None:
    """The engine's KV cache: the CPU computes in float32, and may keep rows in int8.

    Raises:
        UnsupportedModelError: heads that the attention kernel cannot compute.
        EdgeLLMError: an int8 cache, and nobody measured the ranges of keys and values.
    """
    spec = bundle.cache
    if spec is None:
        return None
    if spec.head_dim % 16:
        raise UnsupportedModelError(
            f"head_dim {spec.head_dim}: GroupQueryAttention wants a multiple of 16"
        )
    if DECODER not in bundle.graphs:
        return dataclasses.replace(spec, dtype="float32")
    if plan.kv_cache == "int8" and spec.ranges is None:
        raise EdgeLLMError(
            "--kvCache int8: the bundle does not say which range keys and values have",
            hint="quantize the checkpoint with --kv_cache_quantization int8, and export it again",
        )
    suits = spec.ranges is not None and spec.ranges.calibrated_for == "int8"
    is_int8 = plan.kv_cache == "int8" or (plan.kv_cache == "auto" and suits)
    return dataclasses.replace(spec, dtype="int8" if is_int8 else "float32")


class _Compiler:
    """Makes the graphs of a role."""

    def __init__(
        self, role: str, bundle: Bundle, plan: Plan, folder: Path, cache: KVCacheSpec | None
    ) -> None:
        self._role, self._bundle, self._plan = role, bundle, plan
        self._folder, self._cache = folder, cache

    def compile(
        self, portable: Path, variant: Variant, rounded: WeightFile | None, report: Report
    ) -> LoadedGraph:
        """Lower a graph, let ONNX Runtime optimize and save it, and load what it saved."""
        step = f"lowering the {variant.name} graph"
        report(step)
        is_own = isinstance(variant.kernel, OwnLinears)  # and rounds what it packs
        model = load_portable(portable, None if is_own else rounded)
        lowered = self._lower(model, variant, lambda n: report(f"{step}: {n >> 20} MB written"))
        report(f"optimizing and prepacking the {variant.name} graph")
        saved = optimize(
            lowered, self._folder / f"{variant.name}.onnx", self._plan.threads,
            prepacks=variant.prepacks, probe=lambda session: self._probe(session, variant),
            own_kernels=is_own,
        )  # fmt: skip
        return LoadedGraph(saved, variant.max_rows)

    def _lower(self, model: ir.Model, variant: Variant, told: Callable[[int], None]) -> Path:
        """Write the lowered graph and its weights; the graph's path."""
        path = self._folder / f"{variant.name}.lowered.onnx"
        weights = WeightFile(path.with_suffix(".data"), told)
        lower(
            model, variant.kernel, weights, self._cache, self._plan.kv_capacity,
            needs_mask=variant.needs_mask,
        )  # fmt: skip
        weights.close()
        ir.save(model, path)
        return path

    def _probe(self, session: ort.InferenceSession, variant: Variant) -> Numbers:
        """What a graph computes of a few passes."""
        capacity, rows = self._plan.kv_capacity, variant.max_rows
        graph = LoadedGraph(session, rows)
        runner = OnnxRuntimeRunner([graph], self._cache, capacity)
        runner.hold(held_inputs(self._role, self._bundle))
        found = []
        for inputs in sample_passes(self._role, self._bundle, capacity, rows):
            outputs = runner.run(inputs)
            names = (name for name in outputs if name != contract.CANDIDATE_IDS)
            found.append({name: outputs[name].copy() for name in names})
        return found


def optimize(
    lowered: Path,
    output: Path,
    threads: int,
    *,
    prepacks: bool,
    probe: Callable[[ort.InferenceSession], Numbers],
    own_kernels: bool = False,
) -> ort.InferenceSession:
    """Let ONNX Runtime fold, fuse and prepack once, keep what it made, and load that.

    Prepacked weights are mapped from the file when the engine is loaded, not copied.

    Args:
        lowered: a graph with its weights in `.data`; both are used up.
        output: the saved graph.
        threads: 0 takes all cores.
        prepacks: keep the weights as the kernels read them, too.
        probe: numbers that show what a graph computes.
        own_kernels: it has operators of `device_runtime.kernels`.

    Raises:
        EdgeLLMError: the saved graph does not compute what the lowered one does.
    """
    options = ort.SessionOptions()
    set_threads(options, threads)
    options.log_severity_level = 3
    if own_kernels:
        register(options)
    options.optimized_model_filepath = str(output)
    for key, value in (
        ("optimized_model_external_initializers_file_name", f"{output.stem}.data"),
        ("optimized_model_external_initializers_min_size_in_bytes", "1024"),
        ("save_external_prepacked_constant_initializers", "1" if prepacks else "0"),
    ):
        options.add_session_config_entry(f"session.{key}", value)
    saving = ort.InferenceSession(str(lowered), options, providers=["CPUExecutionProvider"])
    expected = probe(saving)
    del saving
    lowered.unlink()
    lowered.with_suffix(".data").unlink()
    saved = load_graph(output, threads=threads, optimize=False, own_kernels=own_kernels)
    if not _are_alike(probe(saved), expected):
        raise EdgeLLMError(
            f"ONNX Runtime {ort.__version__} saved a {output.stem} graph that computes "
            "something else than the one it was made from",
            hint="install another onnxruntime and report this",
        )
    return saved


def _are_alike(found: Numbers, expected: Numbers) -> bool:
    return all(
        np.allclose(one[name], other[name], rtol=1e-3, atol=1e-3)
        for one, other in zip(found, expected, strict=True)
        for name in other
    )
