"""Flags of `edgellm-chat` only."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from edgellm.core.cli import CAMEL_CASE, with_flags
from edgellm.device_runtime.requests.flags import (
    AllowSpecialTokens,
    EngineDir,
    MultimodalEngineDir,
    Verify,
)
from edgellm.device_runtime.sampling.params import OPTIONS, Option

System = Annotated[
    str,
    typer.Option("--system", help="Set the system prompt. Default: none.", rich_help_panel="Model"),
]
MaxGenerateLength = Annotated[
    int,
    typer.Option(
        "--maxGenerateLength",
        min=1,
        help="Generate at most this many tokens for each message. Default: {default} tokens.",
        rich_help_panel="Limits",
    ),
]
EnableThinking = Annotated[
    bool,
    typer.Option(
        "--enableThinking",
        help="Enable thinking if the chat template supports it.",
        rich_help_panel="Model",
    ),
]
HistoryFile = Annotated[
    Path | None,
    typer.Option(
        "--historyFile",
        help="Keep the typed lines in this file. Default: edgellm/chat_history in the XDG "
        "state folder.",
        rich_help_panel="Output",
    ),
]


def _flag(option: Option) -> tuple[str, Any, Any]:
    name = "--" + CAMEL_CASE["token_normalize_func"](option.name.replace("_", "-"))
    bounds: dict[str, Any] = {"min": option.bounds.get("ge"), "max": option.bounds.get("le")}
    is_seed = option.name == "seed"  # without one, each run has its own
    about = option.doc + (" Default: a random seed." if is_seed else "")
    limits = bounds if option.kind is not bool else {}
    flag = typer.Option(name, help=about, rich_help_panel="Sampling", **limits)
    if is_seed:
        return option.name, Annotated[int | None, flag], None
    return option.name, Annotated[option.kind, flag], option.default


SamplingFlags = make_dataclass("SamplingFlags", map(_flag, OPTIONS.values()), frozen=True)
with_sampling_flags = with_flags("sampling_flags", SamplingFlags)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFlags:
    """Values of the flags of the command."""

    engine_dir: EngineDir
    multimodal_engine_dir: MultimodalEngineDir = None
    system: System = ""
    max_generate_length: MaxGenerateLength = 512
    enable_thinking: EnableThinking = False
    allow_special_tokens: AllowSpecialTokens = False
    history_file: HistoryFile = None
    verify: Verify = None


with_chat_flags = with_flags("flags", ChatFlags)
