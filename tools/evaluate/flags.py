"""The flags of `edgellm-eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EngineDir = Annotated[Path | None, typer.Option("--engineDir", help="Folder made by llm_build.")]
MultimodalEngineDir = Annotated[
    Path | None,
    typer.Option("--multimodalEngineDir", help="Folder made by visual_build, for images."),
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="URL,URL",
        help="Servers of one model instead of --engineDir; Ray spreads the questions over them.",
    ),
]
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        help="mt_bench, humaneval, gsm8k (from packages), summaries, captions (with --dataFile), "
        "or a JSONL file of questions.",
    ),
]
DataFile = Annotated[
    Path | None, typer.Option("--dataFile", help="JSONL file of articles, or of pictures.")
]
OutputDir = Annotated[
    Path | None,
    typer.Option(
        "--outputDir", help="Folder for answers, scores and report; an interrupted run goes on."
    ),
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="The first N questions only.")]
MaxGenerateLength = Annotated[
    int, typer.Option("--maxGenerateLength", min=1, help="Tokens of a turn's answer.")
]
Temperature = Annotated[float, typer.Option("--temperature", min=0, help="0 is greedy.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="For temperatures above 0.")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Answers to every question.")]
RunCode = Annotated[
    bool,
    typer.Option(
        "--runCode",
        help="Run the programs that the model wrote, in a sandbox; without it code is not scored.",
    ),
]
Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option("--compare", metavar="A B", help="Compare two finished runs of the same data."),
]
Convert = Annotated[
    Path | None,
    typer.Option(
        "--convert",
        help="Write the dataset's prompts as GenAI-Perf and AIPerf read them; only that.",
    ),
]
