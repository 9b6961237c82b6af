"""Bundle to ONNX Runtime engine: lower, optimize, prepack, measure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort

from edgellm import contract
from edgellm.build.check import (
    FLOATS,
    Numbers,
    bound_of,
    difference,
    first_difference,
    make_reference,
    require_alike,
    run_passes,
)
from edgellm.build.costs import measure
from edgellm.build.lowering.round_int4 import load_portable, rounded_weights
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.onnxruntime_cpu.lower import lower
from edgellm.build.onnxruntime_cpu.memory_estimate import estimate_graphs
from edgellm.build.onnxruntime_cpu.variants import Variant, variants_of
from edgellm.build.plan import Compiled, Estimate, Plan, Report
from edgellm.contract import EdgeLLMError, UnsupportedModelError
from edgellm.device_runtime.runners.onnxruntime_cpu.runner import LoadedGraph, OnnxRuntimeRunner
from edgellm.device_runtime.runners.onnxruntime_graphs import load_graph, set_threads
from edgellm.manifest import (
    DECODER,
    DRAFT,
    Bundle,
    GraphSpec,
    KVCacheSpec,
    with_kv_dtype,
)


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
    checks: list[str] = []
    with rounded_weights(folder, plan.quantize) as rounded:
        for role, graph in bundle.graphs.items():
            portable = source / graph.path
            compiler = _Compiler(role, bundle, plan, portable, rounded, folder, cache, report)
            opened[role], graphs[role] = compiler.compile()
            checks.append(compiler.check(opened[role], graphs[role]))
    dtype = cache.dtype if cache is not None else ""
    report("measuring the cost of a pass")
    costs, prefill_rows = measure(opened, with_kv_dtype(bundle.spec, dtype), plan)
    return Compiled(graphs, dtype, costs, prefill_rows, checks=tuple(checks))


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
        self,
        role: str,
        bundle: Bundle,
        plan: Plan,
        portable: Path,
        rounded: WeightFile | None,
        folder: Path,
        cache: KVCacheSpec | None,
        report: Report,
    ) -> None:
        self._bundle, self._plan, self._portable, self._rounded = bundle, plan, portable, rounded
        self._folder, self._cache = folder, cache if role in (DECODER, DRAFT) else None
        self._report = report
        self._variants = variants_of(role, ir.load(portable), bundle, plan)
        report(f"computing a few rows of the portable {role} graph")
        self._reference = make_reference(role, bundle, self._cache, portable, rounded, folder)

    def compile(self) -> tuple[OnnxRuntimeRunner, tuple[GraphSpec, ...]]:
        """Lower the graph in all variants, let ONNX Runtime optimize, save and load each."""
        loaded = [self._compile(each) for each in self._variants]
        specs = [
            GraphSpec(f"{each.name}.onnx", each.max_rows, each.precision) for each in self._variants
        ]
        return OnnxRuntimeRunner(loaded, self._cache, self._plan.kv_capacity), tuple(specs)

    def check(self, runner: OnnxRuntimeRunner, graphs: Sequence[GraphSpec]) -> str:
        """See `require_alike`."""
        bound = bound_of(self._bundle, graphs, self._cache)

        def search() -> str:
            return first_difference(
                self._reference, self._portable, self._rounded, self._folder, bound, self._opened
            )

        return require_alike(self._reference, runner, bound, search)

    def _opened(self, model: ir.Model) -> OnnxRuntimeRunner:
        variant = dataclasses.replace(self._variants[-1], name="searched")
        graph = load_graph(self._lower(model, variant), optimize=False)
        return OnnxRuntimeRunner([LoadedGraph(graph)], self._cache, self._plan.kv_capacity)

    def _compile(self, variant: Variant) -> LoadedGraph:
        self._report(f"lowering the {variant.name} graph")
        lowered = self._lower(load_portable(self._portable, self._rounded), variant)
        self._report(f"optimizing and prepacking the {variant.name} graph")
        output, threads = self._folder / f"{variant.name}.onnx", self._plan.threads
        probe = None  # the portable graph will be compared with what is saved
        if self._reference.why_not:
            probe = partial(self._probe, max_rows=variant.max_rows)
        saved = optimize(lowered, output, threads, prepacks=variant.prepacks, probe=probe)
        return LoadedGraph(saved, variant.max_rows)

    def _probe(self, session: ort.InferenceSession, max_rows: int) -> Numbers:
        """What a graph gives for the passes that it is meant for."""
        reference, graph = self._reference, LoadedGraph(session)
        runner = OnnxRuntimeRunner([graph], self._cache, self._plan.kv_capacity)
        passes = [
            each for each in reference.passes
            if contract.INPUT_IDS not in each or each[contract.INPUT_IDS].shape[1] <= max_rows
        ]  # fmt: skip
        return run_passes(runner, reference.role, reference.bundle, passes)

    def _lower(self, model: ir.Model, variant: Variant) -> Path:
        """Write the lowered graph and its weights; the graph's path."""
        path = self._folder / f"{variant.name}.lowered.onnx"
        weights = WeightFile(path.with_suffix(".data"))
        lower(
            model, variant.kernel, weights, self._cache, self._plan.kv_capacity,
            needs_mask=variant.needs_mask,
        )  # fmt: skip
        weights.close()
        ir.save(model, path)
        return path


def optimize(
    lowered: Path,
    output: Path,
    threads: int,
    *,
    prepacks: bool,
    probe: Callable[[ort.InferenceSession], Numbers] | None = None,
) -> ort.InferenceSession:
    """Let ONNX Runtime fold, fuse and prepack once, keep what it made, and load that.

    Prepacked weights are mapped from the file when the engine is loaded, not copied.

    Args:
        lowered: a graph with its weights in `.data`; both are used up.
        output: the saved graph.
        threads: 0 takes all cores.
        prepacks: keep the weights as the kernels read them, too.
        probe: numbers that show what a graph computes, where nothing else will.

    Raises:
        EdgeLLMError: the saved graph does not compute what the lowered one does.
    """
    options = ort.SessionOptions()
    set_threads(options, threads)
    options.log_severity_level = 3
    options.optimized_model_filepath = str(output)
    for key, value in (
        ("optimized_model_external_initializers_file_name", f"{output.stem}.data"),
        ("optimized_model_external_initializers_min_size_in_bytes", "1024"),
        ("save_external_prepacked_constant_initializers", "1" if prepacks else "0"),
    ):
        options.add_session_config_entry(f"session.{key}", value)
    saving = ort.InferenceSession(str(lowered), options, providers=["CPUExecutionProvider"])
    expected = probe(saving) if probe is not None else []
    del saving
    lowered.unlink()
    lowered.with_suffix(".data").unlink()
    saved = load_graph(output, threads=threads, optimize=False)
    if probe is not None and difference(probe(saved), expected) > FLOATS:
        raise EdgeLLMError(
            f"ONNX Runtime {ort.__version__} saved a {output.stem} graph that computes "
            "something else than the one it was made from",
            hint="install another onnxruntime and report this",
        )
    return saved
