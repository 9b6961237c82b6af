"""The flags of `edgellm-bench` that no other command has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Prompt = Annotated[
    str,
    typer.Option(
        "--prompt", help="Prompt lengths, 0 for none; default 128,512 as far as they fit."
    ),
]
Generate = Annotated[int, typer.Option("--generate", min=0, help="Tokens to decode, 0 for none.")]
Depth = Annotated[
    str,
    typer.Option("--depth", help="Tokens in the cache before decoding begins, or before a text."),
]
Repetitions = Annotated[int, typer.Option("--repetitions", min=1, help="Samples of every test.")]
InputFile = Annotated[
    Path | None,
    typer.Option(
        "--inputFile", help="Requests to speculate on, as for llm_inference; default: a few."
    ),
]
Output = Annotated[str, typer.Option("--output", help="Printed as text, markdown, csv or json.")]
