"""Flags of `edgellm-transfer`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Bundle = Annotated[
    Path | None, typer.Argument(metavar="BUNDLE", help="Folder of a bundle or engine to copy.")
]
To = Annotated[
    str | None,
    typer.Argument(
        metavar="user@host:DIR", help="Destination folder on a device, or a local folder."
    ),
]
CheckOnly = Annotated[
    bool, typer.Option("--check", help="Only check the hashes at the destination; send nothing.")
]
Fleet = Annotated[
    Path | None,
    typer.Option("--fleet", help="File of the devices, one user@host:DIR a line; updates all."),
]
Canary = Annotated[
    str,
    typer.Option("--canary", help="Devices to update first, from the top of the file: 3 or 10%."),
]
Parallel = Annotated[
    int, typer.Option("--parallel", min=1, max=64, help="Number of devices updated concurrently.")
]
MaxFailed = Annotated[
    int,
    typer.Option(
        "--max_failed", min=0, help="Maximum failed devices; if more fail, all are rolled back."
    ),
]
Test = Annotated[
    str,
    typer.Option("--test", help="Shell command that tests each device, run in DIR. Default: none."),
]
Rollback = Annotated[
    bool, typer.Option("--rollback", help="Roll the fleet back to the version before its update.")
]
Status = Annotated[bool, typer.Option("--status", help="Show the version of each device.")]
Page = Annotated[
    Path | None,
    typer.Option("--page", help="Also write the versions to FILE.html or FILE.md."),
]
