"""What `visual_build` and `audio_build` share."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgellm.build.cli import show_notes, show_prediction, show_size, show_verdict
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


def build_encoder(
    product: str,
    bundle_dir: Path,
    engine_dir: Path,
    plan: Plan,
    backend: str,
    *,
    is_dry_run: bool,
    overwrite: bool,
) -> None:
    """Build an encoder's engine, or predict it, and print its facts; as `build_engine`."""
    from edgellm.build.artifact_kinds import read_bundle
    from edgellm.build.engine import build_engine, engine_key
    from edgellm.build.resource_estimate import predict

    require_choice("--quantize", plan.quantize, ("none", "int8"))
    if is_dry_run:
        bundle = read_bundle(product, bundle_dir, plan)
        show_prediction(predict(bundle_dir, bundle, plan, backend, engine_dir))
        return
    start = time.perf_counter()
    key = engine_key(product, bundle_dir, engine_dir, plan, backend)
    if is_finished(engine_dir, key, overwrite=overwrite):
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
