"""The flags of `llm_inference`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EngineDir = Annotated[Path, typer.Option("--engineDir", help="Folder made by llm_build.")]
InputFile = Annotated[Path, typer.Option("--inputFile", help="JSON file of requests.")]
OutputFile = Annotated[Path, typer.Option("--outputFile", help="JSON file for the outputs.")]
MultimodalEngineDir = Annotated[
    Path | None,
    typer.Option("--multimodalEngineDir", help="Folder made by visual_build, for images."),
]
Warmup = Annotated[
    int, typer.Option("--warmup", min=0, help="Run the first request N times before the run.")
]
DumpProfile = Annotated[bool, typer.Option("--dumpProfile", help="Print the profile.")]
ProfileFile = Annotated[
    Path | None, typer.Option("--profileOutputFile", help="Write the profile as JSON.")
]
BatchSize = Annotated[
    int | None,
    typer.Option("--batchSize", min=1, help="Maximum batch size, up to that of the engine."),
]
MaxGenerateLength = Annotated[
    int | None, typer.Option("--maxGenerateLength", min=1, help="Overrides the file's value.")
]
TreeFile = Annotated[Path | None, typer.Option("--treeOutputFile", help="Write the trees as JSON.")]
Prove = Annotated[
    int,
    typer.Option(
        "--prove",
        min=0,
        help="Only compare the outputs of N requests with and without speculation.",
    ),
]
ContextReuse = Annotated[
    bool,
    typer.Option(
        "--enableContextReuse",
        help="Reuse the KV cache of the prefix that a request shares with earlier ones.",
    ),
]
AllowSpecialTokens = Annotated[
    bool,
    typer.Option(
        "--allowSpecialTokens",
        help="Parse special tokens that are spelled out in messages.",
    ),
]
Stream = Annotated[bool, typer.Option("--stream", help="Print the text as it is generated.")]
Verify = Annotated[
    bool | None,
    typer.Option(
        "--verify/--noVerify",
        help="Check the hashes of all files, or only sizes (default: hashes of changed files).",
        show_default=False,
    ),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Continue an interrupted run of the same command, if any."),
]
DumpOutput = Annotated[bool, typer.Option("--dumpOutput", help="Print the outputs.")]
