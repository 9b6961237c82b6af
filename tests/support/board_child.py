"""What edgellm prints on a board: NVIDIA's real bindings, empty libraries, a driver on the host.

`real_bindings.py` starts it. Files of the board are in a folder; memory and disk are given. What
goes to standard error is printed, too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import typer

from edgellm.build import resource_estimate
from edgellm.build.cli import app
from edgellm.core.cli import _explain as explain
from edgellm.core.errors import EdgeLLMError
from edgellm.tools.doctor.checks import examine
from edgellm.tools.doctor.machine import Machine


def main(asked: dict[str, Any]) -> None:
    for finding in examine(Machine(Path(asked["root"]), asked["programs"])):
        typer.echo(f"{finding.status:5}  {finding.what}: {finding.found}")
        if finding.remedy:
            typer.echo(f"       remedy: {finding.remedy}")
    if not asked["bundle"]:
        return
    resource_estimate.available_memory_bytes = lambda: asked["available_bytes"]
    resource_estimate.free_disk_bytes = lambda _: 50_000_000_000
    try:
        app(["--onnxDir", asked["bundle"], "--engineDir", "engine", "--dry-run", *asked["flags"]])
    except SystemExit:
        pass
    except EdgeLLMError as error:
        message, hint, _ = explain(error)
        typer.echo(f"error: {message}\nhint: {hint}")


if __name__ == "__main__":
    os.dup2(1, 2)
    sys.setdlopenflags(os.RTLD_LAZY)  # see `real_pycuda.py`
    main(json.load(sys.stdin))
