"""The flags of `llm_build`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

OnnxDir = Annotated[Path, typer.Option("--onnxDir", help="Bundle made by edgellm-export.")]
EngineDir = Annotated[Path, typer.Option("--engineDir", help="Folder for the engine.")]
MaxInputLen = Annotated[int, typer.Option("--maxInputLen", min=1, help="Longest prompt, tokens.")]
KvCapacity = Annotated[
    int,
    typer.Option(
        "--maxKVCacheCapacity",
        "--maxKvCacheCapacity",
        min=2,
        help="Prompt plus answer, tokens.",
    ),
]
MaxBatchSize = Annotated[
    int,
    typer.Option(
        "--maxBatchSize",
        min=1,
        max=256,
        help="Requests that share a pass, and that the KV cache has room for; with edgellm's "
        "kernels, or ONNX Runtime on CUDA.",
    ),
]
MaxLoraRank = Annotated[
    int,
    typer.Option(
        "--maxLoraRank",
        min=0,
        max=1024,
        help="Take LoRA adapters up to this rank while the engine runs; on a CPU with edgellm's "
        "kernels.",
    ),
]
MaxLoras = Annotated[
    int | None,
    typer.Option(
        "--maxLoras",
        min=1,
        max=64,
        help="With --maxLoraRank, on a GPU: adapters that there is room for at a time, 4 if not "
        "given; a CPU holds any number.",
        show_default=False,
    ),
]
Backend = Annotated[str, typer.Option("--backend", help="auto, onnxruntime or tensorrt.")]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        help="cpu or cuda: what computes with onnxruntime, by default the CPU; tensorrt has cuda.",
        show_default=False,
    ),
]
Threads = Annotated[
    int, typer.Option("--threads", min=0, max=os.cpu_count(), help="CPU threads, 0 takes all.")
]
Prefill = Annotated[
    str,
    typer.Option(
        "--prefill",
        help="Prompt precision of quantized engines: int8 is faster but keeps a second copy of "
        "the weights, same keeps one, auto takes int8 where the CPU has int8 dot products.",
    ),
]
Kernels = Annotated[
    str,
    typer.Option(
        "--kernels",
        help="What computes: edgellm (kernels of its own; on the CPU one copy of the weights, and "
        "bits that do not depend on speculation; in TensorRT attention, with a cache that is not "
        "copied), onnxruntime or tensorrt (the library's operators), or auto, which takes "
        "edgellm's where they can be had.",
    ),
]
KvCache = Annotated[
    str,
    typer.Option(
        "--kvCache",
        help="float (as attention computes), float16 (CPU), int8, fp8 (tensorrt), or auto: what "
        "the checkpoint was calibrated for, else float16 on a CPU beside weights of integers.",
    ),
]
Quantize = Annotated[
    str,
    typer.Option(
        "--quantize",
        help="Rounds float weights: int8 (one scale per output channel and activation row), int4 "
        "(blocks of 32), none, or auto, which rounds a draft to int8 where the CPU has int8 "
        "dot products.",
    ),
]
EagleBase = Annotated[
    bool, typer.Option("--eagleBase", "--specBase", help="The base of an EAGLE draft.")
]
EagleDraft = Annotated[
    bool,
    typer.Option(
        "--eagleDraft", "--specDraft", help="An EAGLE draft; goes into its base's engineDir."
    ),
]
MaxVerifyTreeSize = Annotated[
    int | None,
    typer.Option(
        "--maxVerifyTreeSize",
        min=1,
        help="Nodes of a tree, root included: 60 with --eagleBase; without it the engine verifies "
        "trees that need no EAGLE draft.",
    ),
]
MaxDraftTreeSize = Annotated[
    int, typer.Option("--maxDraftTreeSize", min=1, help="Rows drafted in a round (draft).")
]
TargetSm = Annotated[
    str,
    typer.Option(
        "--gpu",
        help="tensorrt: compute capability of the GPU to compile for, e.g. 8.9, ahead of time with "
        "TensorRT-RTX; this machine's GPU if not given.",
    ),
]
Workspace = Annotated[
    int, typer.Option("--workspace", min=0, help="tensorrt: scratch memory, MiB; 0: no limit.")
]
FallbackPrecision = Annotated[
    str,
    typer.Option(
        "--fallbackPrecision",
        help="tensorrt: int4 or fp16, what fp8 and nvfp4 weights become on a GPU without them.",
    ),
]
Attention = Annotated[
    str,
    typer.Option(
        "--attention",
        help="onnxruntime on cuda: fused (GroupQueryAttention, float16; wants onnxruntime-gpu "
        "1.31), plain (products, 1.23), or auto, fused where there is a kernel.",
    ),
]
IntGemm = Annotated[
    str,
    typer.Option(
        "--intGemm",
        help="onnxruntime on cuda: tensor cores on int4 and int8 weights that are not decoded, in "
        "blocks of 32: on, off, or auto, on where trees of more than 16 rows are verified.",
    ),
]
OptLevel = Annotated[
    int | None,
    typer.Option("--optLevel", min=0, max=5, help="tensorrt: how long it may search; 3 is usual."),
]
TimingCache = Annotated[
    Path | None,
    typer.Option("--timingCache", help="tensorrt: file that remembers measured kernels."),
]
LayerReport = Annotated[
    bool,
    typer.Option(
        "--layerReport",
        "--profilingDetailed",
        help="tensorrt: write every kernel, and what was fused, to <graph>.layers.json.",
    ),
]
NoCheck = Annotated[
    bool,
    typer.Option(
        "--noCheck",
        help="Do not compare a few rows of the engine with the bundle's own graph.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dryRun",
        "--dry-run",
        help="Predict sizes and speed, say what does not fit, build nothing.",
    ),
]
