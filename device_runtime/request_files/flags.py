"""The flags of `llm_inference`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from edgellm.core.cli import with_flags

EngineDir = Annotated[
    Path,
    typer.Option(
        "--engineDir",
        help="Run the engine in this folder, which llm_build made.",
        rich_help_panel="Model",
    ),
]
InputFile = Annotated[
    Path | None,
    typer.Option(
        "--inputFile",
        help="Read the requests from this JSON file. Default: those of --prompt.",
        rich_help_panel="Model",
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt",
        metavar="TEXT",
        help="Answer this message and print the text; repeatable. Piped standard input follows "
        "it, and - is standard input alone. Default: the requests of --inputFile.",
        rich_help_panel="Model",
    ),
]
OutputFile = Annotated[
    Path | None,
    typer.Option(
        "--outputFile",
        help="Write the outputs to this JSON file; --inputFile needs it, except with --prove. "
        "Default: no file.",
        rich_help_panel="Output",
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
AudioEngineDir = Annotated[
    Path | None,
    typer.Option(
        "--audioEngineDir",
        help="Encode audio with the engine in this folder, which audio_build made. "
        "Default: no audio.",
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
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--maxTokens",
        min=1,
        help="Generate at most this many tokens for each request that has no limit of its own. "
        "Default: the model's limit, else 256 tokens.",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceFlags:
    """Values of the flags of the command, except those of sampling and speculation."""

    engine_dir: EngineDir
    input_file: InputFile = None
    prompts: Prompts = None
    output_file: OutputFile = None
    multimodal_engine_dir: MultimodalEngineDir = None
    audio_engine_dir: AudioEngineDir = None
    warmup: Warmup = 0
    dump_profile: DumpProfile = False
    profile_file: ProfileFile = None
    batch_size: BatchSize = None
    max_generate_length: MaxGenerateLength = None
    max_tokens: MaxTokens = None
    tree_file: TreeFile = None
    prove_count: Prove = 0
    context_reuse: ContextReuse = False
    allow_special_tokens: AllowSpecialTokens = False
    stream: Stream = False
    verify: Verify = None
    dump_output: DumpOutput = False
    resume: Resume = False


with_inference_flags = with_flags("flags", InferenceFlags)
