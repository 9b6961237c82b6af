"""Flags of `edgellm-transfer`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Bundle = Annotated[
    Path,
    typer.Argument(
        metavar="BUNDLE",
        help="Copy the bundle or engine in this folder.",
        rich_help_panel="Model",
    ),
]
To = Annotated[
    str,
    typer.Argument(
        metavar="user@host:DIR",
        help="Copy to this folder, on a device (user@host:DIR) or this machine.",
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
