"""Flags of `edgellm-bench` only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Prompt = Annotated[
    str,
    typer.Option(
        "--prompt", help="Prompt lengths in tokens; 0 skips prefill. Default: 128,512 if they fit."
    ),
]
Generate = Annotated[
    int, typer.Option("--generate", min=0, help="Number of tokens to decode; 0 skips decoding.")
]
Depth = Annotated[
    str,
    typer.Option("--depth", help="Tokens in the KV cache before decoding; a comma-separated list."),
]
Repetitions = Annotated[
    int, typer.Option("--repetitions", min=1, help="Number of samples of each test.")
]
InputFile = Annotated[
    Path | None,
    typer.Option(
        "--inputFile",
        help="Request file of llm_inference, for --eagle or --spec. Default: built-in requests.",
    ),
]
Output = Annotated[
    str, typer.Option("--output", help="Format of the results: text, markdown, csv or json.")
]
