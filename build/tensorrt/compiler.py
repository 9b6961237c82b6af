"""Bundles to TensorRT engines: check, lower, compile."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

from edgellm.build.lowering.experts import all_weights, refuse_experts
from edgellm.build.lowering.lora import Places, engine_options, write_adapted_layers
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.plan import Compiled, Estimate, Plan
from edgellm.build.tensorrt.builder import Built, build
from edgellm.build.tensorrt.layer_report import notes_of, write_report
from edgellm.build.tensorrt.lowering.cache_plan import CachePlan, plan_cache
from edgellm.build.tensorrt.lowering.downgrade_ops import adapt
from edgellm.build.tensorrt.lowering.int4_blocks import notes_of_blocks
from edgellm.build.tensorrt.lowering.kernel_attention import Kernels
from edgellm.build.tensorrt.lowering.kernel_vocabulary import (
    by_address,
    constant_linears,
    why_not,
)
from edgellm.build.tensorrt.lowering.lower import lower
from edgellm.build.tensorrt.lowering.precision_fallback import (
    check_types,
    fall_back,
    lacking_kinds,
    temporary_weights,
)
from edgellm.build.tensorrt.memory_estimate import FullCompiler, Sizes, estimate_graphs
from edgellm.build.tensorrt.memory_trim import memory_returned
from edgellm.build.tensorrt.options import TensorRtOptions, options_of
from edgellm.build.tensorrt.profiles import Pass, head_rows, in_chunks, passes_of
from edgellm.build.tensorrt.target import find_target
from edgellm.core.commands.progress import Report
from edgellm.core.errors import EdgeLLMError
from edgellm.core.graph_io import (
    past_name,
    present_name,
)
from edgellm.core.graph_roles import COMMIT, DECODER, ENCODER
from edgellm.core.manifest import Bundle, GraphSpec
from edgellm.core.model_spec import DecoderSpec, DraftSpec, KVCacheSpec, VisionSpec, cache_bytes
from edgellm.device_runtime.gpu import memory_bytes
from edgellm.device_runtime.runners.tensorrt import KERNELS
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import ADDRESSED_SUFFIX
from edgellm.device_runtime.runners.tensorrt.device_kv_cache import aligned_capacity
from edgellm.device_runtime.runners.tensorrt.library.refit import LOWERED_SUFFIX, WEIGHTS_SUFFIX
from edgellm.device_runtime.runners.tensorrt.library.trt_import import require_attributes
from edgellm.device_runtime.runners.tensorrt.state_memory import StateLayout

_NAMES = {DECODER: "llm"}  # of files, if not the role's name
_NOT_RUN = "not compared with the portable graph: a build does not run TensorRT engines"
_PRECISIONS = {ir.DataType.FLOAT16: "fp16", ir.DataType.FLOAT: "fp32"}


def compile_bundle(
    source: Path, bundle: Bundle, plan: Plan, folder: Path, report: Report
) -> Compiled:
    """See `edgellm.build.backends.Backend.compile`; nothing is timed."""
    graphs: dict[str, tuple[GraphSpec, ...]] = {}
    notes: tuple[str, ...] = ()
    library = find_target(options_of(plan).target_sm).library
    portable = {role: each for role, each in bundle.graphs.items() if role != COMMIT}
    models = {role: ir.load(source / graph.path) for role, graph in portable.items()}
    cached = _plan_cache(models, bundle, plan)
    del models
    for role, graph in portable.items():
        passes = passes_of(role, bundle, plan)
        compiler = _Compiler(
            role=role, bundle=bundle, plan=plan, folder=folder, report=report, cached=cached
        )
        built = compiler.compile(source / graph.path, passes)
        cache = bundle.cache_of(role)
        is_own = cached is not None and cached.kernels is not None
        if cache is not None and not is_own and library.updates_in_place:
            _require_caches_in_place(built, cache)
        # One file with a profile for each kind of pass; graph i of the manifest is profile i.
        graphs[role] = tuple(
            GraphSpec(f"{compiler.name}.engine", each.max_rows, compiler.precision)
            for each in passes
        )
        notes = notes if len(graphs) > 1 else notes_of(built, passes)
        notes += tuple(f"{role}: {note}" for note in compiler.notes)
        if compiler.fallen:
            notes += (
                f"{role}: {' and '.join(sorted(compiler.fallen))} weights are "
                f"{options_of(plan).fallback_precision} here, rounded from what they were",
            )
    if plan.max_lora_rank:
        write_adapted_layers(source / bundle.graphs[DECODER].path, folder)
    if cached is not None and cached.kernels is None and not library.updates_in_place:
        notes += (f"{library.label} copies caches within each pass; from 10.15 on it need not",)
    if cached is not None and cached.kernels is None and cached.num_experts:
        notes += (
            f"passes of several tokens compute all {cached.num_experts} experts of a layer: "
            f"{library.label} takes no plugins",
        )
    if cached is not None and cached.why_not and not library.is_ahead_of_time:
        notes += (f"TensorRT's operators compute attention, not edgellm's: {cached.why_not}",)
    return Compiled(
        graphs=graphs,
        kv_dtype=cached.dtype if cached is not None else "",
        prefill_rows=in_chunks(bundle, plan).max_input_len,
        notes=notes,
        options={**({KERNELS: cached.way} if cached is not None else {}), **engine_options(plan)},
        checks=(_NOT_RUN,),
    )


def estimate(source: Path, bundle: Bundle, plan: Plan) -> Estimate:
    """See `edgellm.build.backends.Backend.estimate`."""
    _check_plan(plan)
    options = options_of(plan)
    portable = {role: each for role, each in bundle.graphs.items() if role != COMMIT}
    by_role = {role: ir.load(source / graph.path) for role, graph in portable.items()}
    models = list(by_role.values())
    for role, model in by_role.items():
        if bundle.cache_of(role) is None:
            _refuse(model)
    target = find_target(options.target_sm)
    check_types(models, target, options.fallback_precision)
    passes = passes_of(bundle.main_role, bundle, plan)
    rows, cache = max(each.max_rows for each in passes), bundle.cache
    cached = _plan_cache(by_role, bundle, plan)
    if cache is not None and cached is not None:
        cache = dataclasses.replace(cache, dtype=cached.dtype)
        if cached.kernels is not None:  # else the build ends when it registers them
            require_attributes(target.library.trt)
    if isinstance(bundle.spec, VisionSpec):  # rows are patches, or tiles of tokens
        rows *= max(1, bundle.vision.tokens_per_tile)
    answers = plan.max_batch_size
    kv_bytes = cache_bytes(cache, plan.kv_capacity, answers) if cache is not None else 0
    if isinstance(bundle.spec, DecoderSpec) and bundle.spec.recurrent is not None:
        kv_bytes += StateLayout.of(bundle.spec.recurrent, rows).num_bytes
    sizes = Sizes(
        passes=len(passes),
        rows=rows,
        kv_bytes=kv_bytes,
        capacity=plan.kv_capacity,
        device_bytes=_device_bytes(options),
        fallback=options.fallback_precision,
        lacking=frozenset(lacking_kinds(target)),
        full=FullCompiler.of(target.library, options),
        kernels=_kernels_of(cached, passes),
        is_stripped=options.strip_weights,
    )
    found, places = estimate_graphs(models, _dtype(bundle.dtype), sizes), Places.of(plan)
    if places is None:
        return found
    adapters = places.num_bytes(by_role[DECODER].graph, _dtype(bundle.dtype))
    return dataclasses.replace(found, adapter_bytes=adapters)


def _kernels_of(cached: CachePlan | None, passes: Sequence[Pass]) -> Kernels | None:
    """Edgellm's kernels for these passes; None: TensorRT's operators."""
    if cached is None or cached.kernels is None:
        return None
    return dataclasses.replace(cached.kernels, head_rows=head_rows(passes))


def _plan_cache(models: Mapping[str, ir.Model], bundle: Bundle, plan: Plan) -> CachePlan | None:
    """None without a cache."""
    target = find_target(options_of(plan).target_sm)
    return plan_cache(models, bundle, plan, target) if bundle.cache is not None else None


def _refuse(model: ir.Model) -> None:
    refuse_experts(
        model.graph,
        "TensorRT's backend",
        "build for ONNX Runtime on the CPU: --backend onnxruntime",
    )


def _device_bytes(options: TensorRtOptions) -> int:
    """Memory of this machine's GPU, if the engine is compiled for it."""
    return 0 if options.target_sm else memory_bytes()


def _check_plan(plan: Plan) -> None:
    """Reject options for CPU engines; raises `EdgeLLMError`."""
    _refuse_rounding(plan.quantize)
    if plan.prefill == "int8":
        raise EdgeLLMError(
            "--prefill int8 is for the CPU", hint="leave --prefill out: TensorRT has one precision"
        )


def _refuse_rounding(quantize: str) -> None:
    if quantize in ("int8", "int4"):
        raise EdgeLLMError(
            f"--quantize {quantize} rounds for the CPU",
            hint="quantize the checkpoint with edgellm-quantize, and export it again",
        )


def _dtype(name: str) -> ir.DataType:
    return {kind.numpy().name: kind for kind in _PRECISIONS}[name]


class _Compiler:
    """Compiles the graph of a role into a folder."""

    def __init__(
        self,
        *,
        role: str,
        bundle: Bundle,
        plan: Plan,
        folder: Path,
        report: Report,
        cached: CachePlan | None,
    ) -> None:
        kind = bundle.kind.partition("_")[0]  # "visual" or "audio" of encoders
        self.name = kind if role == ENCODER else _NAMES.get(role, role)
        self._plan, self._folder, self._report = plan, folder, report
        self._options, self._dtype = options_of(plan), _dtype(bundle.dtype)
        self.target = find_target(self._options.target_sm)
        self._capacity, self._cached = 0, None
        if (cache := bundle.cache_of(role)) is not None and cached is not None:
            self._cached = cached
            self._capacity = plan.kv_capacity
            if cached.kernels is None:
                self._capacity = aligned_capacity(cache, plan.kv_capacity)
        self._candidates = 0
        if isinstance(bundle.spec, DraftSpec):
            # A round's drafts, top-k times steps, fit into the tree; so does top-k.
            self._candidates = min(plan.max_draft_tree_size, bundle.spec.max_candidates)
        self._places = Places.of(plan) if role == DECODER else None
        self.precision = ""
        self.fallen: set[str] = set()  # kinds of weights in fallback precision
        self.notes: tuple[str, ...] = ()

    def compile(self, portable: Path, passes: Sequence[Pass]) -> Built:
        """Lower a portable graph and compile it into `<name>.engine`."""
        self._report(f"lowering the {self.name} graph")
        engine, threads = self._folder / f"{self.name}.engine", self._plan.threads
        lowered = engine.with_suffix(LOWERED_SUFFIX)
        weights = WeightFile(engine.with_suffix(WEIGHTS_SUFFIX))
        model = ir.load(portable)
        with memory_returned(), temporary_weights(self._folder) as rounded:
            self._fall_back(model, rounded)
            kernels = _kernels_of(self._cached, passes)
            self.notes = tuple(_notes(model, kernels))
            kinds = {weight.kind for _, weight in all_weights(model.graph)} - {"dense"}
            self.precision = "+".join(sorted(kinds)) or _PRECISIONS[self._dtype]
            lower(
                model,
                weights,
                self._dtype,
                self._capacity,
                self._candidates,
                kernels,
                self._places,
                engine.with_suffix(ADDRESSED_SUFFIX),
            )
            library, has_kernels = self.target.library, kernels is not None
            ahead_of_time = library.is_ahead_of_time and not has_kernels
            adapt(model, library.version, ahead_of_time=ahead_of_time)
        weights.close()
        ir.save(model, lowered)
        del model
        self._report(f"compiling the {self.name} graph")
        built = build(
            lowered, passes, engine, self.target, self._options, self._report, threads=threads
        )
        if not self._options.strip_weights:  # else the plan gets them from there
            lowered.unlink()
            weights.path.unlink()
        if self._options.layer_report:
            write_report(self._folder, self.name, passes, built)
        return built

    def _fall_back(self, model: ir.Model, rounded: WeightFile) -> None:
        precision = self._options.fallback_precision
        if precision:
            kinds = fall_back(model, rounded, lacking_kinds(self.target), precision)
            self.fallen |= kinds


def _notes(model: ir.Model, kernels: Kernels | None) -> Iterator[str]:
    """Notes on weights that cost more than they could, with the reason."""
    own = by_address(model.graph, kernels)
    yield from notes_of_blocks(weight for _, weight in constant_linears(model.graph, own))
    faults = why_not(model.graph, kernels) if kernels is not None else {}
    for name, fault in faults.items():
        yield f"{name} is a constant of the plan: {fault}"


def _require_caches_in_place(built: Built, cache: KVCacheSpec) -> None:
    """Check that caches are updated in place; else each pass would copy them.

    Raises:
        EdgeLLMError: the library does not update a layer's cache in place.
    """
    for layer in range(cache.num_layers):
        for part in ("key", "value"):
            if built.caches.get(present_name(layer, part)) != past_name(layer, part):
                raise EdgeLLMError(
                    f"TensorRT does not update {past_name(layer, part)} in place",
                    hint="report it with the bundle's manifest",
                )
