"""Flags of `edgellm-chat` only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from edgellm.core.cli import with_flags
from edgellm.device_runtime.request_files.flags import (
    AllowSpecialTokens,
    AudioEngineDir,
    EngineDir,
    MultimodalEngineDir,
    Verify,
)

System = Annotated[
    str,
    typer.Option("--system", help="Set the system prompt. Default: none.", rich_help_panel="Model"),
]
MaxGenerateLength = Annotated[
    int | None,
    typer.Option(
        "--maxGenerateLength",
        min=1,
        help="Generate at most this many tokens for each message. Default: the model's limit, "
        "else 512 tokens.",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFlags:
    """Values of the flags of the command."""

    engine_dir: EngineDir
    multimodal_engine_dir: MultimodalEngineDir = None
    audio_engine_dir: AudioEngineDir = None
    system: System = ""
    max_generate_length: MaxGenerateLength = None
    enable_thinking: EnableThinking = False
    allow_special_tokens: AllowSpecialTokens = False
    history_file: HistoryFile = None
    verify: Verify = None


with_chat_flags = with_flags("flags", ChatFlags)
