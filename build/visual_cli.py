"""`visual_build`: the bundle of a visual encoder to an engine, on the device that will run it."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from edgellm.build.cli import (
    choose_backend,
    own_flags,
    show_notes,
    show_prediction,
    show_size,
    show_verdict,
)
from edgellm.build.flags import (
    Backend,
    Device,
    DryRun,
    EngineDir,
    FallbackPrecision,
    LayerReport,
    NoCheck,
    OnnxDir,
    OptLevel,
    TargetSm,
    Threads,
    TimingCache,
    Workspace,
)
from edgellm.core.cli import App, Overwrite, run_command
from edgellm.core.commands.entry_points import NOTHING_HALF_WRITTEN
from edgellm.core.commands.output_folder import finished_line, is_finished
from edgellm.core.commands.progress import shown
from edgellm.core.errors import require_choice

app = App()
app.kept = NOTHING_HALF_WRITTEN
MinImageTokens = Annotated[
    int,
    typer.Option(
        "--minImageTokens",
        min=1,
        help="Set the fewest tokens of an image. Default: {default} tokens.",
        rich_help_panel="Limits",
    ),
]
MaxImageTokens = Annotated[
    int,
    typer.Option(
        "--maxImageTokens",
        min=1,
        help="Set the most tokens of all images of a request. Default: {default} tokens.",
        rich_help_panel="Limits",
    ),
]
MaxPerImage = Annotated[
    int,
    typer.Option(
        "--maxImageTokensPerImage",
        min=1,
        help="Scale larger images down to this size. Default: {default} tokens.",
        rich_help_panel="Limits",
    ),
]
Quantize = Annotated[
    str,
    typer.Option(
        "--quantize",
        help="Round float weights: int8 (also the inputs of linear layers), or none.",
        rich_help_panel="Model",
    ),
]


@app.command(
    common=("--onnxDir", "--engineDir", "--maxImageTokens", "--backend", "--quantize"),
    examples=(
        "visual_build --onnxDir visual_bundle --engineDir visual_engine",
        "visual_build --onnxDir visual_bundle --engineDir visual_engine "
        "--maxImageTokens 2048 --quantize int8",
    ),
)
def visual_build(
    onnx_dir: OnnxDir,
    engine_dir: EngineDir,
    min_image_tokens: MinImageTokens = 4,
    max_image_tokens: MaxImageTokens = 1024,
    max_per_image: MaxPerImage = 512,
    backend: Backend = "auto",
    device: Device = "",
    threads: Threads = 0,
    quantize: Quantize = "none",
    target_sm: TargetSm = "",
    workspace: Workspace = 0,
    fallback_precision: FallbackPrecision = "",
    opt_level: OptLevel = None,
    timing_cache: TimingCache = None,
    layer_report: LayerReport = False,
    no_check: NoCheck = False,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
) -> None:
    """Build a visual engine for this machine from the bundle of an encoder."""
    from edgellm.build.artifact_kinds import VISUAL, read_bundle
    from edgellm.build.backends import options_of
    from edgellm.build.engine import build_engine, engine_key
    from edgellm.build.plan import image_plan
    from edgellm.build.resource_estimate import predict

    require_choice("--quantize", quantize, ("none", "int8"))
    name = choose_backend(backend, device)
    flags = own_flags(target_sm, workspace, opt_level, timing_cache, layer_report)
    flags["--fallbackPrecision"] = fallback_precision or None
    options = options_of(name, flags)
    plan = image_plan(
        min_image_tokens, max_image_tokens, max_per_image, threads, quantize, options,
        checks=not no_check,
    )  # fmt: skip
    if dry_run:
        bundle = read_bundle(VISUAL, onnx_dir, plan)
        show_prediction(predict(onnx_dir, bundle, plan, name, engine_dir))
        return
    start = time.perf_counter()
    key = engine_key(VISUAL, onnx_dir, engine_dir, plan, name)
    if is_finished(engine_dir, key, overwrite=overwrite):
        typer.echo(finished_line(engine_dir))
        return
    with shown() as report:
        built = build_engine(VISUAL, onnx_dir, engine_dir, plan, name, report, key.facts())
    seconds = time.perf_counter() - start
    typer.echo(
        f"{engine_dir}: {built.vision.model_type} encoder, {built.library} "
        f"{built.backend_version}, {built.main_graphs[0].precision}; "
        f"{show_size(built.files, seconds)}"
    )
    show_notes(built.options, seconds)
    typer.echo(f"verdict: {show_verdict(built, seconds)}")


def main() -> None:
    """Entry point."""
    run_command(app)
