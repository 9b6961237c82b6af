"""Bundles to TensorRT engines: check, lower, compile."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import onnx_ir as ir

from edgellm.build.lowering.linear_weights import weight_kinds
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.plan import (
    Compiled,
    CompiledDraft,
    CompiledVisual,
    CompilerOptions,
    Estimate,
    Plan,
    Report,
    VisualPlan,
)
from edgellm.build.tensorrt.builder import Built, build
from edgellm.build.tensorrt.kernel_log import Kernel
from edgellm.build.tensorrt.lower import lower_decoder, lower_graph
from edgellm.build.tensorrt.memory import memory_returned
from edgellm.build.tensorrt.memory_estimate import Sizes, estimate_graphs
from edgellm.build.tensorrt.profiles import (
    Pass,
    base_passes,
    draft_passes,
    heads_pass,
    image_pass,
)
from edgellm.build.tensorrt.target import find_target
from edgellm.contract import (
    BundleManifest,
    DecoderSpec,
    DraftBundleManifest,
    EdgeLLMError,
    PassGraph,
    VisualBundleManifest,
    past_name,
    present_name,
)
from edgellm.device_runtime.gpu import memory_bytes

_BASE, _DRAFT, _FUSE, _HEADS, _ENCODER = "llm", "draft", "fuse", "heads", "visual"
_PORTABLE = {
    _BASE: "model", _DRAFT: "model", _FUSE: "fuse", _HEADS: "model", _ENCODER: "model"
}  # fmt: skip
_FIRST_FP8, _FIRST_FP4 = 89, 100  # Ada and Hopper, Blackwell
_PRECISIONS = {ir.DataType.FLOAT16: "fp16", ir.DataType.FLOAT: "fp32"}

Lower = Callable[[ir.Model, WeightFile, ir.DataType], None]


def compile_base(
    bundle: Path, manifest: BundleManifest, plan: Plan, folder: Path, report: Report
) -> Compiled:
    """See `edgellm.build.backends.Backend.compile`; nothing is measured."""
    passes = base_passes(plan)

    def lower(model: ir.Model, weights: WeightFile, dtype: ir.DataType) -> None:
        lower_decoder(model, plan.kv_capacity, weights, dtype)

    graphs = _Graphs(bundle, folder, manifest.dtype, plan.compiler, plan.threads, report)
    built = graphs.compile(_BASE, passes, lower)
    _require_caches_in_place(built, manifest.decoder)
    return Compiled(
        graphs=_pass_graphs(_BASE, passes, graphs.precision),
        kv_dtype=manifest.dtype,
        pass_cost_ms={},
        prefill_rows=plan.max_input_len,
        notes=_notes(built, passes),
    )


def compile_draft(
    bundle: Path, manifest: DraftBundleManifest, plan: Plan, folder: Path, report: Report
) -> CompiledDraft:
    """See `edgellm.build.backends.Backend.compile_draft`; nothing is measured."""
    draft, passes = manifest.draft, _passes_of(manifest, plan)
    name = _HEADS if draft.num_heads else _DRAFT
    # What a round drafts, its top-k times its steps, fits into the tree; so does its top-k.
    candidates = min(plan.max_draft_tree_size, draft.draft_vocab_size)

    def lower(model: ir.Model, weights: WeightFile, dtype: ir.DataType) -> None:
        lower_decoder(model, plan.kv_capacity, weights, dtype, candidates)

    graphs = _Graphs(bundle, folder, manifest.dtype, plan.compiler, plan.threads, report)
    built = graphs.compile(name, passes, lower)
    _require_caches_in_place(built, draft.decoder)
    precision = graphs.precision
    if draft.fuses:
        graphs.compile(_FUSE, passes, lower_graph)
    return CompiledDraft(
        graphs=_pass_graphs(name, passes, precision),
        fuse_graph=f"{_FUSE}.engine" if draft.fuses else "",
        kv_dtype=manifest.dtype,
        step_cost_ms={},
        extend_cost_ms={},
        notes=_notes(built, passes),
    )


def compile_visual(
    bundle: Path, manifest: VisualBundleManifest, plan: VisualPlan, folder: Path, report: Report
) -> CompiledVisual:
    """See `edgellm.build.backends.Backend.compile_visual`."""
    graphs = _Graphs(bundle, folder, manifest.dtype, plan.compiler, plan.threads, report)
    passes = [image_pass(plan, manifest.vision)]
    built = graphs.compile(_ENCODER, passes, lower_graph)
    return CompiledVisual(f"{_ENCODER}.engine", graphs.precision, _notes(built, passes))


def estimate(bundle: Path, manifest: BundleManifest | DraftBundleManifest, plan: Plan) -> Estimate:
    """See `edgellm.build.backends.Backend.estimate`."""
    _check_plan(plan)
    models, passes = [ir.load(bundle / "model.onnx")], _passes_of(manifest, plan)
    if isinstance(manifest, DraftBundleManifest):
        decoder = manifest.draft.decoder
        if manifest.draft.fuses:
            models.append(ir.load(bundle / "fuse.onnx"))
    else:
        decoder = manifest.decoder
    _check_types(models, plan.compiler)
    sizes = Sizes(
        passes=len(passes),
        rows=max(each.max_rows for each in passes),
        kv_bytes=decoder.kv.bytes_per_token * plan.kv_capacity,
        capacity=plan.kv_capacity,
        device_bytes=_device_bytes(plan.compiler),
    )
    return estimate_graphs(models, _dtype(manifest.dtype), sizes)


def _passes_of(manifest: BundleManifest | DraftBundleManifest, plan: Plan) -> list[Pass]:
    if isinstance(manifest, BundleManifest):
        return base_passes(plan)
    return [heads_pass()] if manifest.draft.num_heads else draft_passes(plan)


def estimate_visual(bundle: Path, manifest: VisualBundleManifest, plan: VisualPlan) -> Estimate:
    """See `edgellm.build.backends.Backend.estimate_visual`."""
    _refuse_rounding(plan.quantize)
    model = ir.load(bundle / "model.onnx")
    _check_types([model], plan.compiler)
    tokens = max(1, manifest.vision.tokens_per_tile)  # rows are patches, or tiles of tokens
    rows = image_pass(plan, manifest.vision).max_rows * tokens
    sizes = Sizes(passes=1, rows=rows, device_bytes=_device_bytes(plan.compiler))
    return estimate_graphs([model], _dtype(manifest.dtype), sizes)


def _device_bytes(options: CompilerOptions) -> int:
    """Memory of the GPU, if an engine is compiled for the one that is here."""
    return 0 if options.target_sm else memory_bytes()


def _check_plan(plan: Plan) -> None:
    """Refuse what only the CPU's engines can do; raises `EdgeLLMError`."""
    _refuse_rounding(plan.quantize)
    if plan.prefill == "int8":
        raise EdgeLLMError(
            "--prefill int8 is for the CPU", hint="a TensorRT engine reads prompts as it decodes"
        )
    if plan.kv_cache == "int8":
        raise EdgeLLMError(
            "--kvCache int8: TensorRT updates caches of floats only", hint="leave --kvCache away"
        )


def _refuse_rounding(quantize: str) -> None:
    if quantize in ("int8", "int4"):
        raise EdgeLLMError(
            f"--quantize {quantize} rounds for the CPU",
            hint="quantize the checkpoint with edgellm-quantize, and export it again",
        )


def _check_types(models: list[ir.Model], options: CompilerOptions) -> None:
    """Refuse weights that the GPU has no arithmetic for; int4 and int8 run everywhere.

    Raises:
        EdgeLLMError: says which GPUs have it.
    """
    types = {value.dtype for model in models for value in model.graph.initializers.values()}
    sm = find_target(options.target_sm).sm
    for needed, first, name, instead in (
        (ir.DataType.FLOAT4E2M1, _FIRST_FP4, "NVFP4", "fp8, int4_awq or int8_sq"),
        (ir.DataType.FLOAT8E4M3FN, _FIRST_FP8, "FP8", "int4_awq or int8_sq"),
    ):
        if needed in types and sm < first:
            raise EdgeLLMError(
                f"{name} needs a GPU of compute capability {first / 10} or newer, not {sm / 10}",
                hint=f"quantize with {instead}",
            )


def _dtype(name: str) -> ir.DataType:
    return {kind.numpy().name: kind for kind in _PRECISIONS}[name]


def _pass_graphs(name: str, passes: Sequence[Pass], precision: str) -> tuple[PassGraph, ...]:
    """One file with a profile for each kind of pass; graph i of the manifest is profile i."""
    return tuple(PassGraph(f"{name}.engine", each.max_rows, precision) for each in passes)


class _Graphs:
    """Compiles the graphs of one bundle into one folder."""

    def __init__(
        self,
        bundle: Path,
        folder: Path,
        dtype: str,
        options: CompilerOptions,
        threads: int,
        report: Report,
    ) -> None:
        self._bundle, self._folder, self._dtype = bundle, folder, _dtype(dtype)
        self._options, self._threads, self._report = options, threads, report
        self.precision = ""  # of the weights that were compiled last

    def compile(self, name: str, passes: Sequence[Pass], lower: Lower) -> Built:
        """Lower a portable graph and compile it into `<name>.engine`."""
        self._report(f"lowering the {name} graph")
        lowered = self._folder / f"{name}.lowered.onnx"
        weights = WeightFile(lowered.with_suffix(".data"))
        model = ir.load(self._bundle / f"{_PORTABLE[name]}.onnx")
        kinds = weight_kinds(model) - {"dense"}
        self.precision = "+".join(sorted(kinds)) or _PRECISIONS[self._dtype]
        with memory_returned():
            lower(model, weights, self._dtype)
        weights.close()
        ir.save(model, lowered)
        del model
        self._report(f"compiling the {name} graph")
        target = find_target(self._options.target_sm)
        engine = self._folder / f"{name}.engine"
        built = build(
            lowered, passes, engine, target, self._options, self._report, threads=self._threads
        )
        lowered.unlink()
        weights.path.unlink()
        if self._options.layer_report:
            self._write_layers(name, passes, built.kernels)
        return built

    def _write_layers(self, name: str, passes: Sequence[Pass], kernels: Sequence[Kernel]) -> None:
        summary = {
            each.name: {
                "kernels": sum(kernel.pass_index == index for kernel in kernels),
                "fused_attentions": _count(kernels, index, "is_fused_attention"),
                "decoded_weights": _count(kernels, index, "decodes_weight"),
            }
            for index, each in enumerate(passes)
        }
        content = {"passes": summary, "kernels": [asdict(kernel) for kernel in kernels]}
        path = self._folder / f"{name}.layers.json"
        path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def _notes(built: Built, passes: Sequence[Pass]) -> tuple[str, ...]:
    """What makes passes slower than the precision promises; nothing where kernels are unknown."""
    notes = []
    for index, each in enumerate(passes if built.kernels else ()):
        fused = _count(built.kernels, index, "is_fused_attention")
        decoded = _count(built.kernels, index, "decodes_weight")
        if fused < built.attentions:
            notes.append(f"{each.name}: {fused} of {built.attentions} attentions are one kernel")
        if decoded and each.name != "prefill":
            notes.append(
                f"{each.name}: {decoded} weights are decoded to memory in every pass; int4, "
                "nvfp4 with rounded inputs, and 8 bits with a scale for each channel are not"
            )
    return tuple(notes)


def _count(kernels: Sequence[Kernel], pass_index: int, what: str) -> int:
    return sum(getattr(kernel, what) for kernel in kernels if kernel.pass_index == pass_index)


def _require_caches_in_place(built: Built, decoder: DecoderSpec) -> None:
    """A cache that is not updated where it lies would be copied in every pass.

    Raises:
        EdgeLLMError: the library made something else of a layer's cache.
    """
    for layer in range(decoder.kv.num_layers):
        for part in ("key", "value"):
            if built.caches.get(present_name(layer, part)) != past_name(layer, part):
                raise EdgeLLMError(
                    f"TensorRT does not update {past_name(layer, part)} in place",
                    hint="report it with the bundle's manifest",
                )
