"""Flags of `edgellm-transfer`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Bundle = Annotated[
    Path | None,
    typer.Argument(
        metavar="BUNDLE",
        help="Copy the bundle or engine in this folder. Default: none, for --status.",
        rich_help_panel="Model",
    ),
]
To = Annotated[
    str | None,
    typer.Argument(
        metavar="user@host:DIR",
        help="Copy to this folder, on a device (user@host:DIR) or this machine. Default: --fleet.",
        rich_help_panel="Output",
    ),
]
CheckOnly = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Only check the hashes at the destination, and send nothing.",
        rich_help_panel="Debug",
    ),
]
Fleet = Annotated[
    Path | None,
    typer.Option(
        "--fleet",
        help="Update all devices of this file, one user@host:DIR a line. Default: one device.",
        rich_help_panel="Model",
    ),
]
Canary = Annotated[
    str,
    typer.Option(
        "--canary",
        help="Update this many devices first, from the top of the file: 3 or 10%. Default: "
        "{default} device.",
        rich_help_panel="Limits",
    ),
]
Parallel = Annotated[
    int,
    typer.Option(
        "--parallel",
        min=1,
        max=64,
        help="Update this many devices concurrently. Default: {default} devices.",
        rich_help_panel="Limits",
    ),
]
MaxFailed = Annotated[
    int,
    typer.Option(
        "--max_failed",
        min=0,
        help="Roll all devices back if more than this many fail. Default: {default} devices.",
        rich_help_panel="Limits",
    ),
]
Test = Annotated[
    str,
    typer.Option(
        "--test",
        help="Run this shell command in DIR to test each device. Default: no test.",
        rich_help_panel="Debug",
    ),
]
Rollback = Annotated[
    bool,
    typer.Option(
        "--rollback",
        help="Roll the fleet back to the version before its update.",
        rich_help_panel="Output",
    ),
]
Status = Annotated[
    bool,
    typer.Option("--status", help="Show the version of each device.", rich_help_panel="Output"),
]
Page = Annotated[
    Path | None,
    typer.Option(
        "--page",
        help="Also write the versions to FILE.html or FILE.md. Default: no page.",
        rich_help_panel="Output",
    ),
]
