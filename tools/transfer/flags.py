"""The flags of `edgellm-transfer`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Bundle = Annotated[
    Path | None, typer.Argument(metavar="BUNDLE", help="A bundle or an engine, with its manifest.")
]
To = Annotated[
    str | None,
    typer.Argument(
        metavar="user@host:DIR", help="The folder that becomes the bundle; or a local one."
    ),
]
CheckOnly = Annotated[
    bool, typer.Option("--check", help="Send nothing, check the hashes of what is there.")
]
Fleet = Annotated[
    Path | None,
    typer.Option("--fleet", help="A file with one user@host:DIR in a line: all of them."),
]
Canary = Annotated[
    str, typer.Option("--canary", help="The first devices of the file, which go first: 3 or 10%.")
]
Parallel = Annotated[int, typer.Option("--parallel", min=1, max=64, help="Devices at a time.")]
MaxFailed = Annotated[
    int, typer.Option("--max_failed", min=0, help="If more fail, all that were updated go back.")
]
Test = Annotated[
    str, typer.Option("--test", help="A shell command for each device, in DIR; its failure is one.")
]
Rollback = Annotated[
    bool, typer.Option("--rollback", help="Give the fleet what it had before its last update.")
]
Status = Annotated[bool, typer.Option("--status", help="Say which version each device has.")]
Page = Annotated[
    Path | None, typer.Option("--page", help="Write that as a page: FILE.html or FILE.md.")
]
