"""`edgellm-doctor`: a line for each thing that building and running needs."""

from __future__ import annotations

from typing import Annotated

import typer

from edgellm.command import run_command

app = typer.Typer(add_completion=True, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def doctor(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Look at driver, CUDA, JetPack, memory, power mode, packages; exit code 1 for a fault."""
    del debug  # read by run_command
    from edgellm.tools.doctor.checks import FAULT, examine
    from edgellm.tools.doctor.machine import Machine

    faults = 0
    for finding in examine(Machine()):
        typer.echo(f"{finding.status:5}  {finding.what}: {finding.found}")
        if finding.remedy:
            typer.echo(f"       remedy: {finding.remedy}")
        faults += finding.status == FAULT
    if faults:
        raise typer.Exit(1)


def main() -> None:
    """Entry point."""
    run_command(app)
