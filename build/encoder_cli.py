"""Flags and steps of `visual_build` and `audio_build`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    FallbackPrecision,
    LayerReport,
    NoCheck,
    OptLevel,
    StripWeights,
    TargetSm,
    Threads,
    TimingCache,
    Workspace,
)
from edgellm.core.cli import Overwrite, with_flags
from edgellm.core.commands.output_folder import finished_line, is_finished
from edgellm.core.commands.progress import shown
from edgellm.core.errors import require_choice

if TYPE_CHECKING:
    from edgellm.build.plan import Plan

EncoderQuantize = Annotated[
    str,
    typer.Option(
        "--quantize",
        help="Round float weights: int8 (also the inputs of linear layers), or none.",
        rich_help_panel="Model",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFlags:
    """Flags of both commands."""

    backend: Backend = "auto"
    device: Device = ""
    threads: Threads = 0
    quantize: EncoderQuantize = "none"
    target_sm: TargetSm = ""
    workspace: Workspace = 0
    fallback_precision: FallbackPrecision = ""
    opt_level: OptLevel = None
    timing_cache: TimingCache = None
    layer_report: LayerReport = False
    strip_weights: StripWeights = False
    no_check: NoCheck = False
    dry_run: DryRun = False
    overwrite: Overwrite = False


with_encoder_flags = with_flags("encoder_flags", EncoderFlags)


def build_encoder(
    product: str,
    bundle_dir: Path,
    engine_dir: Path,
    flags: EncoderFlags,
    limited: Callable[..., Plan],
) -> None:
    """Build an encoder's engine, or predict it, and print its facts; as `build_engine`.

    Args:
        product: of `artifact_kinds`.
        bundle_dir: of the encoder.
        engine_dir: is written.
        flags: of the command.
        limited: makes a plan with the command's limits, from threads, quantization and options.
    """
    from edgellm.build.artifact_kinds import read_bundle
    from edgellm.build.backends import options_of
    from edgellm.build.engine import build_engine, engine_key
    from edgellm.build.resource_estimate import predict

    backend = choose_backend(flags.backend, flags.device, target_sm=flags.target_sm)
    own: dict[str, Any] = own_flags(
        flags.target_sm,
        flags.workspace,
        flags.opt_level,
        flags.timing_cache,
        flags.layer_report,
        flags.strip_weights,
    )
    own["--fallbackPrecision"] = flags.fallback_precision or None
    plan = limited(
        threads=flags.threads,
        quantize=flags.quantize,
        options=options_of(backend, own),
        checks=not flags.no_check,
    )
    require_choice("--quantize", plan.quantize, ("none", "int8"))
    if flags.dry_run:
        bundle = read_bundle(product, bundle_dir, plan)
        show_prediction(predict(bundle_dir, bundle, plan, backend, engine_dir))
        return
    start = time.perf_counter()
    key = engine_key(product, bundle_dir, engine_dir, plan, backend)
    if is_finished(engine_dir, key, overwrite=flags.overwrite):
        typer.echo(finished_line(engine_dir))
        return
    with shown() as report:
        built = build_engine(product, bundle_dir, engine_dir, plan, backend, report, key.facts())
    seconds = time.perf_counter() - start
    typer.echo(
        f"{engine_dir}: {built.encoder.model_type} encoder, {built.library} "
        f"{built.backend_version}, {built.main_graphs[0].precision}; "
        f"{show_size(built.files, seconds)}"
    )
    show_notes(built.options, seconds)
    typer.echo(f"verdict: {show_verdict(built, seconds)}")
