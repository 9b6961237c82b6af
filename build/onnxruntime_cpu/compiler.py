"""Bundle to ONNX Runtime engine: lower, optimize, prepack, measure."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir

from edgellm.build.lowering.embeddings import lookup_ranges
from edgellm.build.lowering.linears.round_int4 import load_portable, rounded_weights
from edgellm.build.lowering.lora import write_adapted_layers
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.onnxruntime_cpu.commit_graph import compile_commit
from edgellm.build.onnxruntime_cpu.edgellm_kernels.attention import page_spec
from edgellm.build.onnxruntime_cpu.edgellm_kernels.embedding import rounded_block
from edgellm.build.onnxruntime_cpu.edgellm_kernels.linears import OwnLinears
from edgellm.build.onnxruntime_cpu.expert_check import check_experts
from edgellm.build.onnxruntime_cpu.graph_variants import Variant, resolve_auto, variants_of
from edgellm.build.onnxruntime_cpu.lower import lower, take_answers
from edgellm.build.onnxruntime_cpu.memory_estimate import estimate_graphs
from edgellm.build.onnxruntime_cpu.optimize import optimize
from edgellm.build.onnxruntime_cpu.options import kernels_of, notes_of
from edgellm.build.pass_timing import measure
from edgellm.build.plan import Compiled, Estimate, Plan
from edgellm.build.verify.check import Verdict, require_alike, run_passes
from edgellm.build.verify.reference import Numbers, Source, make_reference
from edgellm.build.verify.rounding_simulation import Rounds
from edgellm.core import graph_io
from edgellm.core.commands.progress import Report, part_of
from edgellm.core.errors import (
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.core.graph_roles import COMMIT, DECODER, ENCODER, HEADS, ROLES
from edgellm.core.manifest import Bundle, GraphSpec, with_kv_dtype
from edgellm.core.model_spec import BFLOAT16, INT4, DraftSpec, KVCacheSpec
from edgellm.core.resources import trim
from edgellm.device_runtime.adapted_layers import MAX_LORA_RANK
from edgellm.device_runtime.kernels.packed_layout import VERSION
from edgellm.device_runtime.runners.onnxruntime_cpu import EDGELLM, KERNELS, LAYOUT, LOOKUPS
from edgellm.device_runtime.runners.onnxruntime_cpu.processor import has_bfloat_products
from edgellm.device_runtime.runners.onnxruntime_cpu.runner import (
    LoadedGraph,
    OnnxRuntimeRunner,
    open_runner,
)
from edgellm.device_runtime.runners.onnxruntime_graphs import (
    GraphOptions,
    load_graph,
    maps_weights,
)
from edgellm.device_runtime.runners.onnxruntime_import import ort

_HEAD_STEP, _LARGEST_HEAD = 8, 512  # head_dim: ONNX Runtime's attention; edgellm's kernels
_EXACT = {"fp32", "fp16", "bf16", "fp8"}  # float products with unrounded inputs


def estimate(source: Path, bundle: Bundle, plan: Plan) -> Estimate:
    """See `edgellm.build.backends.Backend.estimate`."""
    plan = resolve_auto(source, bundle, plan)
    return estimate_graphs(source, bundle, plan, _cache(source, bundle, plan))


def compile_bundle(
    source: Path, bundle: Bundle, plan: Plan, folder: Path, report: Report
) -> Compiled:
    """See `edgellm.build.backends.Backend.compile`."""
    plan = resolve_auto(source, bundle, plan)
    cache = _cache(source, bundle, plan)
    graphs: dict[str, tuple[GraphSpec, ...]] = {}
    opened: dict[str, OnnxRuntimeRunner] = {}
    verdicts: list[Verdict] = []
    expected = estimate_graphs(source, bundle, plan, cache)
    rounding = part_of(report, "rounding weights to INT4", expected.engine_bytes)
    with rounded_weights(folder, plan.quantize, rounding) as rounded:
        portables = {**bundle.graphs}
        one, commit, moving = portables.pop(COMMIT, None), None, {}
        if one is not None:
            commit, spec = compile_commit(
                source / one.path, folder, plan.threads, own_kernels=kernels_of(plan) == EDGELLM
            )
            moving = {COMMIT: (spec,)}
        for role, graph in portables.items():
            own = cache if ROLES[role].has_cache else None
            portable = Source(
                role=role,
                bundle=bundle,
                path=source / graph.path,
                rounded=rounded,
                cache=own,
                capacity=plan.kv_capacity,
                commit=commit,
            )
            compiler = _Compiler(
                source=portable,
                plan=plan,
                folder=folder,
                report=report,
                expected_bytes=expected.engine_bytes,
            )
            opened[role], graphs[role] = compiler.compile()
            verdicts.append(compiler.check(opened[role]))
        if commit is not None:
            opened[COMMIT] = commit
    if plan.max_lora_rank:
        write_adapted_layers(source / bundle.graphs[DECODER].path, folder)
    dtype, pages = (cache.dtype, cache.pages) if cache is not None else ("", None)
    report("timing forward passes")
    costs, prefill_rows = measure(opened, with_kv_dtype(bundle.spec, dtype, pages), plan)
    own = ENCODER not in bundle.graphs  # whose layers stay with ONNX Runtime
    return Compiled(
        graphs={**graphs, **moving},
        kv_dtype=dtype,
        cost_ms=costs,
        prefill_rows=prefill_rows,
        notes=(*(notes_of(plan) if own else ()), *expected.notes),
        options=_what_runs(plan, folder, graphs) if own else {},
        checks=tuple(each.text for each in verdicts),
        check_s=sum(each.seconds for each in verdicts),
        pages=pages,
    )


def _what_runs(
    plan: Plan, folder: Path, graphs: dict[str, tuple[GraphSpec, ...]]
) -> dict[str, Any]:
    """Options of the engine, see `runners.onnxruntime_cpu`."""
    kernels = kernels_of(plan)
    layout: dict[str, Any] = {}
    if kernels == EDGELLM:
        paths = {graph.path for of_role in graphs.values() for graph in of_role}
        mapped = [path for path in sorted(paths) if maps_weights(folder / path)]
        ranges = {path: lookup_ranges(ir.load(folder / path).graph) for path in mapped}
        tables = {path: own for path, own in ranges.items() if own}
        layout = {LAYOUT: VERSION} | ({LOOKUPS: tables} if tables else {})
    rank = {MAX_LORA_RANK: plan.max_lora_rank} if plan.max_lora_rank else {}
    return {KERNELS: kernels, "threads": plan.threads, **layout, **rank}


def _cache(source: Path, bundle: Bundle, plan: Plan) -> KVCacheSpec | None:
    """The engine's KV cache, in pages with edgellm's kernels.

    Raises:
        UnsupportedModelError: head sizes that the attention kernel does not support.
        EdgeLLMError: a cache type that the engine does not support.
    """
    spec = bundle.cache
    if spec is None:
        return None
    role = next(role for role in bundle.graphs if ROLES[role].has_cache)
    model, is_own = ir.load(source / bundle.graphs[role].path), kernels_of(plan) == EDGELLM
    for layer in range(spec.num_layers):
        _require_head_dim(spec.heads_of(layer)[1], is_own=is_own)
    dtype = "float32"
    if role == DECODER:
        precision = variants_of(role, model, bundle, plan)[0].precision
        has_halves = is_own and bool(set(precision.split("+")) - _EXACT)
        dtype = _rows_type(spec, plan.kv_cache, is_own, has_halves)
    spec = dataclasses.replace(spec, dtype=dtype)
    if is_own:
        num_trailing = bundle.spec.num_trailing if isinstance(bundle.spec, DraftSpec) else 0
        pages = page_spec(model.graph, plan, bundle.decoder, num_trailing, is_int4=dtype == INT4)
        spec = dataclasses.replace(spec, pages=pages)
    return spec


def _require_head_dim(size: int, *, is_own: bool) -> None:
    """Raise `UnsupportedModelError` for head sizes that the chosen kernels do not support."""
    if is_own and size > _LARGEST_HEAD:
        raise UnsupportedModelError(
            f"head_dim {size}: edgellm's kernels compute heads of at most {_LARGEST_HEAD} numbers",
            hint="give --kernels onnxruntime",
        )
    if not is_own and size % _HEAD_STEP:
        raise UnsupportedModelError(
            f"head_dim {size}: with --kernels onnxruntime heads have a multiple of {_HEAD_STEP} "
            "numbers",
            hint="leave out --kernels: edgellm's own compute any up to "
            f"{_LARGEST_HEAD}; they need a C++ compiler or edgellm's wheel",
        )


def _rows_type(spec: KVCacheSpec, wanted: str, is_own: bool, has_halves: bool) -> str:
    """The CPU computes in float32, and may keep rows in less; it does where it rounds inputs, too.

    `wanted`: by `--kvCache`. `has_halves`: whether "auto" is 16 bits without measured ranges.
    """
    if wanted == "fp8":
        raise EdgeLLMError("--kvCache fp8 is for --backend tensorrt", hint="leave it out")
    if wanted in ("float16", BFLOAT16, INT4) and not is_own:
        raise EdgeLLMError(
            f"--kvCache {wanted}: ONNX Runtime's operators keep float32 or int8",
            hint="leave out --kernels and --prefill; edgellm's kernels need a C++ compiler or its "
            "wheel",
        )
    if wanted == "int8" and spec.ranges is None:
        raise EdgeLLMError(
            "--kvCache int8: the bundle does not say which range keys and values have",
            hint="quantize the checkpoint with --kv_cache_quantization int8, and export it again",
        )
    if wanted == "auto":
        is_measured = spec.ranges is not None and spec.ranges.calibrated_for == "int8"
        if is_measured or not has_halves:
            return "int8" if is_measured else "float32"
        return BFLOAT16 if has_bfloat_products() else "float16"
    return "float32" if wanted == "float" else wanted


class _Compiler:
    """Compiles the graphs of a role."""

    def __init__(
        self, *, source: Source, plan: Plan, folder: Path, report: Report, expected_bytes: int
    ) -> None:
        """`expected_bytes`: of the engine, for the progress lines."""
        self._source, self._plan, self._folder, self._report = source, plan, folder, report
        self._variants = variants_of(source.role, ir.load(source.path), source.bundle, plan)
        self._takes_adapters = bool(plan.max_lora_rank) and source.role == DECODER
        self._expected_bytes, self._written_bytes = expected_bytes, 0
        kernels = tuple(each.kernel for each in self._variants)
        self._engine = Rounds(kernels, table_block=lambda node: rounded_block(node, kernels))
        phase = f"computing a few tokens with the portable {source.role} graph"
        report(phase)
        self._reference = make_reference(
            source,
            plan.kv_capacity,
            self._engine,
            wanted=plan.checks,
            on_progress=lambda done, total: report(
                f"{phase}: part {done} of {total}, {done / total:.0%}"
            ),
        )

    def compile(self) -> tuple[OnnxRuntimeRunner, tuple[GraphSpec, ...]]:
        """Lower the graph in all variants, let ONNX Runtime optimize, save and load each."""
        loaded = [self._compile(each) for each in self._variants]
        specs = [
            GraphSpec(f"{each.name}.onnx", each.max_rows, each.precision) for each in self._variants
        ]
        return self._runner(loaded), tuple(specs)

    def check(self, runner: OnnxRuntimeRunner) -> Verdict:
        """See `require_alike`; each expert is also compared alone."""
        self._report(f"comparing the {self._source.role} graph with the portable one")
        verdict = require_alike(self._reference, runner, self._open)
        if self._reference.why_not:
            return verdict
        start, experts = time.perf_counter(), []
        for variant in self._variants:
            if _is_own(variant):
                graph = self._folder / f"{variant.name}.onnx"
                experts.append(check_experts(self._source, graph, self._engine))
        text = "; ".join(each for each in (verdict.text, *experts) if each)
        return Verdict(text, verdict.seconds + time.perf_counter() - start)

    def _open(self, load: Callable[[], ir.Model]) -> OnnxRuntimeRunner:
        """A runner of lowered models that are neither optimized nor saved."""
        loaded = []
        for variant in self._variants:
            path = self._lower(load(), dataclasses.replace(variant, name=f"search.{variant.name}"))
            graph = load_graph(path, GraphOptions(optimize=False, own_kernels=_is_own(variant)))
            loaded.append(LoadedGraph(graph, variant.max_rows))
        return self._runner(loaded)

    def _runner(self, loaded: Sequence[LoadedGraph]) -> OnnxRuntimeRunner:
        plan = self._plan
        return open_runner(loaded, self._source.cache, plan.kv_capacity, plan.max_batch_size)

    def _compile(self, variant: Variant) -> LoadedGraph:
        step, is_own = f"packing weights of the {variant.name} graph", _is_own(variant)
        self._report(step)
        packed = part_of(self._report, step, self._expected_bytes)
        # edgellm's kernels round weights when packing, unless a check has rounded them already.
        rounds = is_own and self._reference.why_not
        model = load_portable(self._source.path, None if rounds else self._source.rounded)
        lowered = self._lower(model, variant, lambda size: packed(self._written_bytes + size))
        self._written_bytes += lowered.with_suffix(".data").stat().st_size
        trim()  # frees decoded weights
        self._report(f"optimizing and prepacking the {variant.name} graph")
        # The saved graph will be compared with the portable one, if that is possible.
        probe = partial(self._probe, variant) if self._reference.why_not else None
        saved = optimize(
            lowered, self._folder / f"{variant.name}.onnx", self._plan.threads,
            prepacks=variant.prepacks, probe=probe, own_kernels=is_own,
        )  # fmt: skip
        return LoadedGraph(saved, variant.max_rows)

    def _probe(self, variant: Variant, session: ort.InferenceSession) -> Numbers:
        """Outputs of a graph for its passes."""
        passes = [
            each for each in self._reference.passes
            if graph_io.INPUT_IDS not in each
            or each[graph_io.INPUT_IDS].shape[1] <= variant.max_rows
        ]  # fmt: skip
        return run_passes(self._runner([LoadedGraph(session)]), self._source, passes)

    def _lower(
        self, model: ir.Model, variant: Variant, on_progress: Callable[[int], None] = lambda _: None
    ) -> Path:
        """Write the lowered graph and its weights; the graph's path."""
        path = self._folder / f"{variant.name}.lowered.onnx"
        weights = WeightFile(path.with_suffix(".data"), on_progress)
        lower(
            model, variant.kernel, weights, self._source.cache, self._plan.kv_capacity,
            needs_mask=variant.needs_mask, takes_adapters=self._takes_adapters,
        )  # fmt: skip
        weights.close()
        if self._source.role == HEADS and self._plan.max_batch_size > 1:
            take_answers(model.graph)
        ir.save(model, path)
        return path


def _is_own(variant: Variant) -> bool:
    """Whether its graph has operators of `device_runtime.kernels`."""
    return isinstance(variant.kernel, OwnLinears)
