"""Flags of `edgellm-chat` only."""

from __future__ import annotations

from dataclasses import make_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from edgellm.core.cli import CAMEL_CASE, with_flags
from edgellm.device_runtime.sampling.params import OPTIONS, Option

System = Annotated[str, typer.Option("--system", help="System prompt. Default: none.")]
MaxGenerateLength = Annotated[
    int, typer.Option("--maxGenerateLength", min=1, help="Maximum tokens of an answer.")
]
EnableThinking = Annotated[
    bool,
    typer.Option("--enableThinking", help="Enable thinking if the chat template supports it."),
]
HistoryFile = Annotated[
    Path | None,
    typer.Option(
        "--historyFile",
        help="File of typed lines. Default: edgellm/chat_history in the XDG state folder.",
    ),
]


def _flag(option: Option) -> tuple[str, Any, Any]:
    name = "--" + CAMEL_CASE["token_normalize_func"](option.name.replace("_", "-"))
    bounds: dict[str, Any] = {"min": option.bounds.get("ge"), "max": option.bounds.get("le")}
    flag = typer.Option(name, help=option.doc, **(bounds if option.kind is not bool else {}))
    if option.name == "seed":  # without one, each run has its own
        return option.name, Annotated[int | None, flag], None
    return option.name, Annotated[option.kind, flag], option.default


SamplingFlags = make_dataclass("SamplingFlags", map(_flag, OPTIONS.values()), frozen=True)
with_sampling_flags = with_flags("sampling_flags", SamplingFlags)
