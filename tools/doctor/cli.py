"""`edgellm-doctor`: checks of all that building and running needs."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from edgellm.build.flags import Backend, TargetSm
from edgellm.core.cli import App, run_command

app = App()


@app.command(
    common=("--onnxDir", "--backend", "--gpu"),
    examples=(
        "edgellm-doctor",
        "edgellm-doctor --onnxDir bundle --backend onnxruntime",
    ),
)
def doctor(
    onnx_dir: Annotated[
        Path | None,
        typer.Option(
            "--onnxDir",
            help="Check whether this bundle can be built here with default lengths. Default: no "
            "bundle.",
            rich_help_panel="Model",
        ),
    ] = None,
    backend: Backend = "auto",
    target_sm: TargetSm = "",
) -> None:
    """Check driver, CUDA, JetPack, memory, power mode and packages; exit with 1 on a fault."""
    from edgellm.tools.doctor.checks import FAULT, examine
    from edgellm.tools.doctor.machine import Machine

    faults, findings = 0, examine(Machine())
    if onnx_dir is not None:
        from edgellm.tools.doctor.fit import examine_bundle

        findings = chain(findings, examine_bundle(onnx_dir, backend, target_sm))
    for finding in findings:
        typer.echo(f"{finding.status:5}  {finding.what}: {finding.found}")
        if finding.remedy:
            typer.echo(f"       remedy: {finding.remedy}")
        faults += finding.status == FAULT
    if faults:
        raise typer.Exit(1)


def main() -> None:
    """Entry point."""
    run_command(app)
