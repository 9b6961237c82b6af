"""Flags of `edgellm-bench` only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from edgellm.core.cli import with_flags
from edgellm.device_runtime.request_files.flags import EngineDir, Verify

Prompt = Annotated[
    str,
    typer.Option(
        "--prompt",
        help="Measure prefill at these prompt lengths in tokens, as a list; 0 skips prefill. "
        "Default: 128,512 if they fit.",
        rich_help_panel="Limits",
    ),
]
Generate = Annotated[
    int,
    typer.Option(
        "--generate",
        min=0,
        help="Measure decoding of this many tokens; 0 skips decoding. Default: {default} tokens.",
        rich_help_panel="Limits",
    ),
]
Depth = Annotated[
    str,
    typer.Option(
        "--depth",
        help="Measure decoding after this many tokens in the KV cache, as a list. Default: "
        "{default} tokens.",
        rich_help_panel="Limits",
    ),
]
Repetitions = Annotated[
    int,
    typer.Option(
        "--repetitions",
        min=1,
        help="Repeat each test this many times. Default: {default} times.",
        rich_help_panel="Limits",
    ),
]
InputFile = Annotated[
    Path | None,
    typer.Option(
        "--inputFile",
        help="Measure speculation on this request file of llm_inference. Default: built-in "
        "requests.",
        rich_help_panel="Model",
    ),
]
MeasuresEnergy = Annotated[
    bool,
    typer.Option(
        "--energy",
        help="Measure joules per token and watts with the machine's counters: RAPL on x86, INA "
        "sensors on Jetson.",
        rich_help_panel="Limits",
    ),
]
Output = Annotated[
    str,
    typer.Option(
        "--output",
        help="Choose the format of the results: text, markdown, csv or json.",
        rich_help_panel="Output",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFlags:
    """Values of the flags of the command."""

    engine_dir: EngineDir
    prompt: Prompt = ""
    generate: Generate = 64
    depth: Depth = "0"
    repetitions: Repetitions = 5
    input_file: InputFile = None
    energy: MeasuresEnergy = False
    output: Output = "text"
    verify: Verify = None


with_bench_flags = with_flags("flags", BenchFlags)
