"""The flags of `edgellm-chat` that no other command has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

System = Annotated[str, typer.Option("--system", help="The system prompt.")]
Temperature = Annotated[
    float, typer.Option("--temperature", min=0, help="0 takes the most likely token.")
]
TopP = Annotated[float, typer.Option("--topP", help="Keep tokens up to this probability.")]
TopK = Annotated[int, typer.Option("--topK", min=0, help="Keep so many tokens, 0 for all.")]
Seed = Annotated[
    int | None, typer.Option("--seed", min=0, help="Makes answers repeatable; default: another.")
]
MaxGenerateLength = Annotated[
    int, typer.Option("--maxGenerateLength", min=1, help="Tokens of an answer, at most.")
]
EnableThinking = Annotated[
    bool, typer.Option("--enableThinking", help="Let models think first whose template can.")
]
HistoryFile = Annotated[
    Path | None,
    typer.Option("--historyFile", help="Keeps what you type; default: in your state folder."),
]
