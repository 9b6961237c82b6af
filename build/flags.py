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
        help="Prompt plus output, tokens.",
    ),
]
MaxBatchSize = Annotated[
    int,
    typer.Option(
        "--maxBatchSize",
        min=1,
        max=256,
        help="Maximum batch size, which also sizes the KV cache; with edgellm's "
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
        help="With --maxLoraRank, on a GPU: maximum number of loaded adapters, 4 if not "
        "given; a CPU has no limit.",
        show_default=False,
    ),
]
Backend = Annotated[str, typer.Option("--backend", help="auto, onnxruntime or tensorrt.")]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        help="cpu or cuda: device of onnxruntime, by default the CPU; tensorrt has cuda only.",
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
        help="Operators: edgellm (its own kernels; on the CPU one copy of the weights, and "
        "bits that do not depend on speculation; in TensorRT attention without copies of the "
        "cache), onnxruntime or tensorrt (the library's operators), or auto, which uses "
        "edgellm's where they are available.",
    ),
]
KvCache = Annotated[
    str,
    typer.Option(
        "--kvCache",
        help="float (as attention computes), float16 (CPU), int8, fp8 (tensorrt), or auto: the "
        "checkpoint's calibrated type, else float16 on a CPU with integer weights.",
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
        help="Maximum nodes of a tree, root included: 60 with --eagleBase; without it the engine "
        "verifies trees of drafters without hidden taps.",
    ),
]
MaxDraftTreeSize = Annotated[
    int, typer.Option("--maxDraftTreeSize", min=1, help="Maximum nodes drafted in a round (draft).")
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
        help="onnxruntime on cuda: integer tensor-core GEMMs for int4 and int8 weights, in "
        "blocks of 32: on, off, or auto, on if trees of more than 16 nodes are verified.",
    ),
]
OptLevel = Annotated[
    int | None,
    typer.Option(
        "--optLevel", min=0, max=5, help="tensorrt: builder optimization level, usually 3."
    ),
]
TimingCache = Annotated[
    Path | None,
    typer.Option("--timingCache", help="tensorrt: timing cache file."),
]
LayerReport = Annotated[
    bool,
    typer.Option(
        "--layerReport",
        "--profilingDetailed",
        help="tensorrt: write all kernels and fusions to <graph>.layers.json.",
    ),
]
NoCheck = Annotated[
    bool,
    typer.Option(
        "--noCheck",
        help="Do not compare logits of a few tokens with the bundle's graph.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dryRun",
        "--dry-run",
        help="Predict sizes and speed, report exceeded limits, build nothing.",
    ),
]
