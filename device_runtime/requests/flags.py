"""The flags of `llm_inference`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EngineDir = Annotated[
    Path,
    typer.Option(
        "--engineDir",
        help="Run the engine in this folder, which llm_build made.",
        rich_help_panel="Model",
    ),
]
InputFile = Annotated[
    Path,
    typer.Option(
        "--inputFile", help="Read the requests from this JSON file.", rich_help_panel="Model"
    ),
]
OutputFile = Annotated[
    Path,
    typer.Option(
        "--outputFile", help="Write the outputs to this JSON file.", rich_help_panel="Output"
    ),
]
MultimodalEngineDir = Annotated[
    Path | None,
    typer.Option(
        "--multimodalEngineDir",
        help="Encode images with the engine in this folder, which visual_build made. "
        "Default: text only.",
        rich_help_panel="Model",
    ),
]
Warmup = Annotated[
    int,
    typer.Option(
        "--warmup",
        min=0,
        help="Run the first request this many times before the measured run. Default: "
        "{default} runs.",
        rich_help_panel="Debug",
    ),
]
DumpProfile = Annotated[
    bool,
    typer.Option(
        "--dumpProfile",
        help="Print times and speeds as JSON after the run.",
        rich_help_panel="Output",
    ),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profileOutputFile",
        help="Write times and speeds to this JSON file. Default: no file.",
        rich_help_panel="Output",
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batchSize",
        min=1,
        help="Run at most this many requests in one batch, up to the engine's batch size. "
        "Default: batch_size of the file.",
        rich_help_panel="Limits",
    ),
]
MaxGenerateLength = Annotated[
    int | None,
    typer.Option(
        "--maxGenerateLength",
        min=1,
        help="Generate at most this many tokens for each request. Default: "
        "max_generate_length of the file.",
        rich_help_panel="Limits",
    ),
]
TreeFile = Annotated[
    Path | None,
    typer.Option(
        "--treeOutputFile",
        help="Write the draft trees to this JSON file, for edgellm-trees. Default: no file.",
        rich_help_panel="Output",
    ),
]
Prove = Annotated[
    int,
    typer.Option(
        "--prove",
        min=0,
        help="Only compare the outputs of the first requests with and without speculation, "
        "and write no file. Default: {default} requests.",
        rich_help_panel="Debug",
    ),
]
ContextReuse = Annotated[
    bool,
    typer.Option(
        "--enableContextReuse",
        help="Reuse the KV cache of the prefix that a request shares with earlier ones.",
        rich_help_panel="Limits",
    ),
]
AllowSpecialTokens = Annotated[
    bool,
    typer.Option(
        "--allowSpecialTokens",
        help="Parse special tokens that are spelled out in messages.",
        rich_help_panel="Model",
    ),
]
Stream = Annotated[
    bool,
    typer.Option("--stream", help="Print the text as it is generated.", rich_help_panel="Output"),
]
Verify = Annotated[
    bool | None,
    typer.Option(
        "--verify/--noVerify",
        help="Check the hashes of all files, or with --noVerify their sizes only. Default: "
        "hashes of changed files.",
        rich_help_panel="Debug",
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue an interrupted run of the same command, if there is one.",
        rich_help_panel="Output",
    ),
]
DumpOutput = Annotated[
    bool,
    typer.Option("--dumpOutput", help="Print the outputs after the run.", rich_help_panel="Output"),
]
