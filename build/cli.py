"""`llm_build`: ONNX bundle to engine, on the device that will run it."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from edgellm.build.flags import (
    Attention,
    Backend,
    Device,
    DryRun,
    EagleBase,
    EagleDraft,
    EngineDir,
    FallbackPrecision,
    IntGemm,
    Kernels,
    KvCache,
    KvCapacity,
    LayerReport,
    MaxBatchSize,
    MaxDraftTreeSize,
    MaxInputLen,
    MaxLoraRank,
    MaxLoras,
    MaxVerifyTreeSize,
    NoCheck,
    OnnxDir,
    OptLevel,
    Prefill,
    Quantize,
    StripWeights,
    TargetSm,
    Threads,
    TimingCache,
    Workspace,
)
from edgellm.core.cli import App, Overwrite, run_command
from edgellm.core.commands.entry_points import NOTHING_HALF_WRITTEN
from edgellm.core.commands.output_folder import finished_line, is_finished
from edgellm.core.commands.progress import shown
from edgellm.core.errors import EdgeLLMError
from edgellm.core.graph_roles import PASS, measured_name
from edgellm.core.manifest import DRAFT_ENGINE, DRAFT_FOLDER, Engine, FileRecord, library_of

if TYPE_CHECKING:
    from edgellm.build.plan import Options, Plan
    from edgellm.build.resource_estimate import Prediction

# --onnx-dir is --onnxDir
app = App()
app.kept = NOTHING_HALF_WRITTEN


@app.command(
    common=("--onnxDir", "--engineDir", "--maxInputLen", "--maxKVCacheCapacity", "--backend"),
    examples=(
        "llm_build --onnxDir bundle --engineDir engine --maxInputLen 1024 "
        "--maxKVCacheCapacity 2048",
        "llm_build --onnxDir draft_bundle --engineDir engine --specDraft",
    ),
)
def llm_build(
    onnx_dir: OnnxDir,
    engine_dir: EngineDir,
    max_input_len: MaxInputLen = 1024,
    kv_capacity: KvCapacity = 4096,
    max_batch_size: MaxBatchSize = 1,
    max_lora_rank: MaxLoraRank = 0,
    max_loras: MaxLoras = None,
    backend: Backend = "auto",
    device: Device = "",
    threads: Threads = 0,
    prefill: Prefill = "auto",
    kernels: Kernels = "auto",
    quantize: Quantize = "auto",
    kv_cache: KvCache = "auto",
    eagle_base: EagleBase = False,
    eagle_draft: EagleDraft = False,
    max_verify_tree_size: MaxVerifyTreeSize = None,
    max_draft_tree_size: MaxDraftTreeSize = 60,
    target_sm: TargetSm = "",
    workspace: Workspace = 0,
    fallback_precision: FallbackPrecision = "",
    attention: Attention = "auto",
    int_gemm: IntGemm = "auto",
    opt_level: OptLevel = None,
    timing_cache: TimingCache = None,
    layer_report: LayerReport = False,
    strip_weights: StripWeights = False,
    no_check: NoCheck = False,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
) -> None:
    """Build an engine for this machine from an ONNX bundle."""
    from edgellm.build.backends import options_of
    from edgellm.build.plan import Plan

    _check_words(prefill, kernels, quantize, kv_cache)
    product = _product(eagle_base=eagle_base, eagle_draft=eagle_draft)
    name = choose_backend(backend, device, kernels, target_sm)
    flags = own_flags(target_sm, workspace, opt_level, timing_cache, layer_report, strip_weights)
    flags |= _chosen({"--kernels": kernels, "--attention": attention, "--intGemm": int_gemm})
    flags |= {"--fallbackPrecision": fallback_precision or None, "--maxLoras": max_loras}
    options = options_of(name, flags)
    plan = Plan(
        max_input_len=max_input_len,
        kv_capacity=kv_capacity,
        threads=threads,
        prefill=prefill,
        quantize=quantize,
        kv_cache=kv_cache,
        is_eagle_base=eagle_base,
        max_verify_tree_size=max_verify_tree_size
        or (_tree_size(onnx_dir, options) if eagle_base else 0),
        max_draft_tree_size=max_draft_tree_size if eagle_draft else 0,
        options=options,
        checks=not no_check,
        max_batch_size=max_batch_size,
        max_lora_rank=max_lora_rank,
    )
    _run(product, onnx_dir, engine_dir, plan, name, dry_run=dry_run, overwrite=overwrite)


def _tree_size(source: Path, options: Options) -> int:
    """The default limit of trees, announced if it is not the largest."""
    from edgellm.build.verify_tree_size import LARGEST, default_size

    size = default_size(source, options)
    if size < LARGEST:
        typer.echo(
            f"trees of at most {size} nodes, since INT4 weights of this GPU verify larger ones "
            "slowly; --maxVerifyTreeSize changes it"
        )
    return size


def choose_backend(backend: str, device: str, kernels: str = "auto", target_sm: str = "") -> str:
    """The name of the backend of these flags, announced if "auto" chose it.

    `target_sm` is that of `--gpu`, for which TensorRT-RTX compiles ahead of time.

    Raises:
        EdgeLLMError: unknown, unavailable here, or not for the device or the kernels.
    """
    from edgellm.build.backends import choose, find, implied_library

    if device:
        _check_choice("--device", device, "cpu", "cuda")
    if (implied := implied_library(backend, device, target_sm)) != backend:
        typer.echo(f"backend: {find(implied).LABEL} (--gpu {target_sm} compiles ahead of time)")
        backend, device = implied, ""
    _require_cuda(backend, device)
    name = choose(backend, device)
    _check_kernels(kernels, library_of(name))
    announce(backend, device)
    return name


def _product(*, eagle_base: bool, eagle_draft: bool) -> str:
    if eagle_base and eagle_draft:
        raise EdgeLLMError(
            "--eagleBase and --eagleDraft are two builds",
            hint="run llm_build once for each, into the same --engineDir",
        )
    return "draft" if eagle_draft else "llm"


def _chosen(words: dict[str, str]) -> dict[str, str | None]:
    """Words by flag; None in the place of "auto"."""
    return {flag: None if word == "auto" else word for flag, word in words.items()}


def own_flags(
    target_sm: str,
    workspace: int,
    opt_level: int | None,
    timing_cache: Path | None,
    layer_report: bool,
    strip_weights: bool,
) -> dict[str, Any]:
    """The flags of some backends by name; None where one was not given."""
    return {
        "--gpu": target_sm or None,
        "--workspace": workspace or None,
        "--optLevel": opt_level,
        "--timingCache": timing_cache,
        "--layerReport": layer_report or None,
        "--stripWeights": strip_weights or None,
    }


def announce(backend: str, device: str) -> None:
    """Print the backend chosen by "auto" and why faster ones are unavailable; else nothing."""
    from edgellm.device_runtime import runners

    if backend != "auto":
        return
    name, reasons = runners.automatic(device)
    against = [f"not {runners.title(each)}: {why}" for each, why in reasons.items()]
    if len(set(reasons.values())) == 1 < len(reasons):
        against = [*set(reasons.values())]
    why = f" ({'; '.join(against)})" if against else ""
    typer.echo(f"backend: {runners.title(name)}{why}")


def _require_cuda(backend: str, device: str) -> None:
    """Reject `--device cuda` where CUDA cannot run, unless a library is named that compiles.

    Raises:
        EdgeLLMError: no backend runs on CUDA here.
    """
    from edgellm.device_runtime import runners

    if backend != "auto" or device != "cuda":
        return
    name, reasons = runners.automatic(device)
    if name in reasons:
        why = "; ".join(dict.fromkeys(reasons.values()))
        raise EdgeLLMError(
            f"--device cuda: CUDA cannot run here ({why})",
            hint="leave it out to build for the CPU; --backend onnxruntime --device cuda builds "
            "for the GPU of another machine",
        )


def _check_choice(flag: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise EdgeLLMError(f"{flag} {value}: give {', '.join(allowed[:-1])} or {allowed[-1]}")


def _run(
    product: str,
    onnx_dir: Path,
    engine_dir: Path,
    plan: Plan,
    backend: str,
    *,
    dry_run: bool,
    overwrite: bool,
) -> None:
    from edgellm.build.artifact_kinds import fitted
    from edgellm.build.engine import build_engine, engine_key, target_folder

    plan = fitted(product, onnx_dir, plan)
    if dry_run:
        _predict(product, onnx_dir, engine_dir, plan, backend)
        return
    start, target = time.perf_counter(), target_folder(product, engine_dir)
    key = engine_key(product, onnx_dir, engine_dir, plan, backend)
    if is_finished(target, key, overwrite=overwrite):
        typer.echo(finished_line(target))
        return
    with shown() as report:
        built = build_engine(product, onnx_dir, engine_dir, plan, backend, report, key.facts())
    _show(built, engine_dir, time.perf_counter() - start)


def _predict(product: str, onnx_dir: Path, engine_dir: Path, plan: Plan, backend: str) -> None:
    from edgellm.build.artifact_kinds import read_bundle
    from edgellm.build.resource_estimate import predict

    bundle = read_bundle(product, onnx_dir, plan)
    prediction = predict(onnx_dir, bundle, plan, backend, engine_dir)
    show_prediction(prediction, prediction.speed_lines())


def show_prediction(prediction: Prediction, speed_lines: Sequence[str] = ()) -> None:
    """Print the prediction of a dry run; raises `LimitError` if the machine is too small."""
    from edgellm.build.resource_estimate import require_fit

    for line in (*prediction.size_lines(), *speed_lines, *prediction.need_lines()):
        typer.echo(line)
    require_fit(prediction.needs)


def _check_words(prefill: str, kernels: str, quantize: str, kv_cache: str) -> None:
    for flag, value, allowed in (
        ("--prefill", prefill, ("auto", "same", "int8")),
        ("--kernels", kernels, ("auto", "edgellm", "onnxruntime", "tensorrt")),
        ("--quantize", quantize, ("auto", "none", "int8", "int4")),
        (
            "--kvCache",
            kv_cache,
            ("auto", "float", "float16", "bfloat16", "int8", "int4", "fp8"),
        ),
    ):
        _check_choice(flag, value, *allowed)


def _check_kernels(kernels: str, library: str) -> None:
    """Reject the operators of another library."""
    if kernels in ("onnxruntime", "tensorrt") and kernels != library:
        raise EdgeLLMError(
            f"--kernels {kernels} is not for {library}", hint=f"it goes with --backend {kernels}"
        )


def _show(built: Engine, engine_dir: Path, seconds: float) -> None:
    from edgellm.device_runtime.runners.pass_timing import BUDGET_S

    graphs = ", ".join(f"{g.precision} up to {g.max_rows} tokens" for g in built.main_graphs)
    where = engine_dir / DRAFT_FOLDER if built.kind == DRAFT_ENGINE else engine_dir
    typer.echo(
        f"{where}: {built.library} {built.backend_version}, {graphs}; "
        f"{show_size(built.files, seconds)}"
    )
    show_notes(built.options, seconds)
    for kind, costs in built.cost_ms.items():
        is_decoder = kind == PASS and built.decoder.is_causal
        prompts = f"; prefill in chunks of {built.prefill_rows} tokens" if is_decoder else ""
        listed = _listed(costs, built.estimated.get(kind, []))
        typer.echo(f"{measured_name(kind)} takes, in ms by tokens: {listed}{prompts}")
    if built.estimated:
        typer.echo(f"~ is estimated from smaller passes: a build times {BUDGET_S:.0f} s at most")
    typer.echo(f"verdict: {show_verdict(built, seconds)}")


def show_verdict(built: Engine, seconds: float) -> str:
    """Size, duration of the build, speed of one sequence, and what the check proved, as text."""
    size = sum(record.num_bytes for record in built.files.values())
    parts = [f"{size / 1e6:.1f} MB in {seconds:.1f} s"]
    one = built.cost_ms.get(PASS, {}).get("1")
    if one and built.decoder.is_causal:
        parts.append(f"one sequence decodes about {1000 / one:.0f} tokens/s here when short")
    if any(" passed: " in check for check in built.options.get("checks", ())):
        parts.append("outputs equal those of the bundle up to the engine's rounding")
    else:
        parts.append("outputs were not compared with those of the bundle")
    return "; ".join(parts)


def show_notes(options: Mapping[str, Any], seconds: float) -> None:
    """Print a backend's notes on an engine, and how it was checked.

    Args:
        options: of the engine.
        seconds: duration of its build.
    """
    for check in options.get("checks", ()):
        typer.echo(f"check: {check}")
    if check_s := options.get("check_s"):
        typer.echo(f"check: took {check_s:.1f} s, {check_s / seconds:.0%} of the build")
    for note in options.get("notes", ()):
        typer.echo(f"note: {note}", err=True)


def show_size(files: Mapping[str, FileRecord], seconds: float) -> str:
    """Size, duration and peak memory of a build, as text."""
    size = sum(record.num_bytes for record in files.values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"{size / 1e6:.1f} MB in {seconds:.1f} s, peak memory {peak / 1e6:.0f} MB"


def _listed(costs: dict[str, float], estimated: Sequence[int]) -> str:
    marks = {rows: "~" if int(rows) in estimated else "" for rows in costs}
    return ", ".join(f"{rows}: {marks[rows]}{ms:.2f}" for rows, ms in costs.items())


def main() -> None:
    """Entry point."""
    run_command(app)
