"""Flags of `edgellm-eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EngineDir = Annotated[
    Path | None, typer.Option("--engineDir", help="Folder of llm_build; required without --ray.")
]
MultimodalEngineDir = Annotated[
    Path | None,
    typer.Option(
        "--multimodalEngineDir", help="Folder of visual_build, for images. Default: text only."
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="URL,URL",
        help="Servers of one model, used instead of --engineDir; Ray distributes the questions.",
    ),
]
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        help="Dataset: mt_bench, humaneval or gsm8k from packages; summaries or captions with "
        "--dataFile; or a JSONL file of questions.",
    ),
]
DataFile = Annotated[
    Path | None,
    typer.Option(
        "--dataFile",
        help="JSONL file of the dataset; required for summaries and captions.",
    ),
]
OutputDir = Annotated[
    Path | None,
    typer.Option(
        "--outputDir", help="Folder of answers, scores and report; resumes an interrupted run."
    ),
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", min=1, help="Number of questions, from the first. Default: all."),
]
MaxGenerateLength = Annotated[
    int, typer.Option("--maxGenerateLength", min=1, help="Maximum tokens of each turn's answer.")
]
Temperature = Annotated[
    float, typer.Option("--temperature", min=0, help="Sampling temperature; 0 decodes greedily.")
]
Seed = Annotated[
    int, typer.Option("--seed", min=0, help="Sampling seed, used with temperatures above 0.")
]
Repeats = Annotated[
    int, typer.Option("--repeats", min=1, help="Number of answers to each question.")
]
RunCode = Annotated[
    bool,
    typer.Option(
        "--runCode",
        help="Run generated programs in a sandbox to score them. Default: code is not scored.",
    ),
]
Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        "--compare", metavar="A B", help="Compare two finished runs of the same questions."
    ),
]
Convert = Annotated[
    Path | None,
    typer.Option(
        "--convert",
        help="Only write the dataset's prompts to this file, in the format of GenAI-Perf.",
    ),
]
