"""Flags of `edgellm-eval`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from edgellm.core.cli import Overwrite, with_flags

EngineDir = Annotated[
    Path | None,
    typer.Option(
        "--engineDir",
        help="Evaluate the engine in this folder, which llm_build made. Default: the servers "
        "of --ray.",
        rich_help_panel="Model",
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
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="URL,URL",
        help="Evaluate these servers of one model, as URL,URL, instead of --engineDir; Ray "
        "distributes the questions. Default: --engineDir.",
        rich_help_panel="Server",
    ),
]
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        help="Choose the dataset: mt_bench, humaneval or gsm8k from packages, summaries or "
        "captions with --dataFile, or a JSONL file of questions. Default: none; "
        "evaluating needs one.",
        rich_help_panel="Model",
    ),
]
DataFile = Annotated[
    Path | None,
    typer.Option(
        "--dataFile",
        help="Read the dataset from this JSONL file, which summaries and captions need. "
        "Default: the dataset's package.",
        rich_help_panel="Model",
    ),
]
OutputDir = Annotated[
    Path | None,
    typer.Option(
        "--outputDir",
        help="Write answers, scores and report to this folder, and resume an interrupted run "
        "there. Default: none; evaluating needs one.",
        rich_help_panel="Output",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        "--limit",
        min=1,
        help="Evaluate this many questions, from the first. Default: all questions.",
        rich_help_panel="Limits",
    ),
]
MaxGenerateLength = Annotated[
    int,
    typer.Option(
        "--maxGenerateLength",
        min=1,
        help="Generate at most this many tokens for each turn. Default: {default} tokens.",
        rich_help_panel="Limits",
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        min=0,
        help="Sample at this temperature; 0 decodes greedily.",
        rich_help_panel="Sampling",
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        min=0,
        help="Set the seed of sampling, for temperatures above 0.",
        rich_help_panel="Sampling",
    ),
]
Repeats = Annotated[
    int,
    typer.Option(
        "--repeats",
        min=1,
        help="Generate this many answers to each question. Default: {default} answer.",
        rich_help_panel="Sampling",
    ),
]
RunCode = Annotated[
    bool,
    typer.Option(
        "--runCode",
        help="Run generated programs in a sandbox to score them.",
        rich_help_panel="Debug",
    ),
]
Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        "--compare",
        metavar="A B",
        help="Compare two finished runs of the same questions. Default: no comparison.",
        rich_help_panel="Output",
    ),
]
Convert = Annotated[
    Path | None,
    typer.Option(
        "--convert",
        help="Only write the dataset's prompts to this file, in the format of GenAI-Perf. "
        "Default: no file.",
        rich_help_panel="Output",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalFlags:
    """Values of the flags of the command."""

    engine_dir: EngineDir = None
    ray: Ray = None
    dataset: Dataset = None
    data_file: DataFile = None
    output_dir: OutputDir = None
    multimodal_engine_dir: MultimodalEngineDir = None
    limit: Limit = None
    max_generate_length: MaxGenerateLength = 256
    temperature: Temperature = 0.0
    seed: Seed = 0
    repeats: Repeats = 1
    run_code: RunCode = False
    compare: Compare = None
    convert: Convert = None
    overwrite: Overwrite = False


with_eval_flags = with_flags("flags", EvalFlags)
