"""`visual_build`: the bundle of a visual encoder to an engine, on the device that will run it."""

from __future__ import annotations

from typing import Annotated

import typer

from edgellm.build.cli import choose_backend, own_flags
from edgellm.build.encoder_cli import EncoderQuantize, build_encoder
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
    quantize: EncoderQuantize = "none",
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
    from edgellm.build.artifact_kinds import VISUAL
    from edgellm.build.backends import options_of
    from edgellm.build.plan import image_plan

    name = choose_backend(backend, device)
    flags = own_flags(target_sm, workspace, opt_level, timing_cache, layer_report)
    flags["--fallbackPrecision"] = fallback_precision or None
    plan = image_plan(
        min_image_tokens,
        max_image_tokens,
        max_per_image,
        threads,
        quantize,
        options_of(name, flags),
        checks=not no_check,
    )
    build_encoder(VISUAL, onnx_dir, engine_dir, plan, name, is_dry_run=dry_run, overwrite=overwrite)


def main() -> None:
    """Entry point."""
    run_command(app)
