"""`visual_build`: the bundle of a visual encoder to an engine, on the device that will run it."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from edgellm.build.cli import check_device, show_notes, show_prediction, show_size, status
from edgellm.build.flags import (
    Backend,
    Debug,
    Device,
    DryRun,
    EngineDir,
    LayerReport,
    OnnxDir,
    OptLevel,
    TargetSm,
    Threads,
    TimingCache,
    Workspace,
)
from edgellm.command import ONE_CASE, run_command
from edgellm.contract import EdgeLLMError

app = typer.Typer(
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=ONE_CASE,
)
MinImageTokens = Annotated[
    int, typer.Option("--minImageTokens", min=1, help="Fewest tokens of an image.")
]
MaxImageTokens = Annotated[
    int, typer.Option("--maxImageTokens", min=1, help="Tokens of all images of a request.")
]
MaxPerImage = Annotated[
    int,
    typer.Option(
        "--maxImageTokensPerImage", min=1, help="Larger images are made smaller to fit this."
    ),
]
Quantize = Annotated[
    str,
    typer.Option("--quantize", help="Rounds float weights: int8 (and inputs of layers), or none."),
]


@app.command()
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
    opt_level: OptLevel = None,
    timing_cache: TimingCache = None,
    layer_report: LayerReport = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Build a visual engine for this machine from the bundle of an encoder."""
    del debug  # read by run_command
    from edgellm.build.backends import choose
    from edgellm.build.fit import predict
    from edgellm.build.plan import CompilerOptions, VisualPlan
    from edgellm.build.visual import build_visual, read_visual_bundle
    from edgellm.device_runtime.runners import library_of

    if quantize not in ("none", "int8"):
        raise EdgeLLMError(f"--quantize {quantize}: give none or int8")
    check_device(device)
    compiler = CompilerOptions(target_sm, workspace, opt_level, timing_cache, layer_report)
    plan = VisualPlan(
        min_image_tokens, max_image_tokens, max_per_image, threads, quantize, compiler
    )
    name = choose(backend, device)
    if dry_run:
        manifest = read_visual_bundle(onnx_dir, plan)
        show_prediction(predict(onnx_dir, manifest, plan, name, engine_dir))
        return
    start = time.perf_counter()
    with status() as report:
        built = build_visual(onnx_dir, engine_dir, plan, name, report)
    typer.echo(
        f"{engine_dir}: {built.vision.model_type} encoder, {library_of(built.backend)} "
        f"{built.backend_version}, {built.precision}; "
        f"{show_size(built.files, time.perf_counter() - start)}"
    )
    show_notes(built.options)


def main() -> None:
    """Entry point."""
    run_command(app)
