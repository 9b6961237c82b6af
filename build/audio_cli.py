"""`audio_build`: the bundle of an audio encoder to an engine, on the device that will run it."""

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
MaxAudioSeconds = Annotated[
    int,
    typer.Option(
        "--maxAudioSeconds",
        min=1,
        max=3600,
        help="Set the longest audio clip. Default: {default} seconds.",
        rich_help_panel="Limits",
    ),
]


@app.command(
    common=("--onnxDir", "--engineDir", "--maxAudioSeconds", "--backend", "--quantize"),
    examples=(
        "audio_build --onnxDir audio_bundle --engineDir audio_engine",
        "audio_build --onnxDir audio_bundle --engineDir audio_engine "
        "--maxAudioSeconds 600 --quantize int8",
    ),
)
def audio_build(
    onnx_dir: OnnxDir,
    engine_dir: EngineDir,
    max_audio_s: MaxAudioSeconds = 120,
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
    """Build an audio engine for this machine from the bundle of an encoder."""
    from edgellm.build.artifact_kinds import AUDIO
    from edgellm.build.backends import options_of
    from edgellm.build.plan import audio_plan

    name = choose_backend(backend, device)
    flags = own_flags(target_sm, workspace, opt_level, timing_cache, layer_report)
    flags["--fallbackPrecision"] = fallback_precision or None
    plan = audio_plan(max_audio_s, threads, quantize, options_of(name, flags), checks=not no_check)
    build_encoder(AUDIO, onnx_dir, engine_dir, plan, name, is_dry_run=dry_run, overwrite=overwrite)


def main() -> None:
    """Entry point."""
    run_command(app)
