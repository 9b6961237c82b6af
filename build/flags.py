"""The flags of `llm_build`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

OnnxDir = Annotated[
    Path,
    typer.Option(
        "--onnxDir",
        help="Read the bundle in this folder, which edgellm-export made.",
        rich_help_panel="Model",
    ),
]
EngineDir = Annotated[
    Path,
    typer.Option("--engineDir", help="Write the engine to this folder.", rich_help_panel="Output"),
]
MaxInputLen = Annotated[
    int,
    typer.Option(
        "--maxInputLen",
        min=1,
        help="Set the longest prompt. Default: {default} tokens.",
        rich_help_panel="Limits",
    ),
]
KvCapacity = Annotated[
    int,
    typer.Option(
        "--maxKVCacheCapacity",
        min=2,
        help="Set the longest sequence, the prompt and its output together. Default: "
        "{default} tokens.",
        rich_help_panel="Limits",
    ),
]
MaxBatchSize = Annotated[
    int,
    typer.Option(
        "--maxBatchSize",
        min=1,
        max=256,
        help="Set the maximum batch size, which also sizes the KV cache. It needs edgellm's "
        "kernels, or ONNX Runtime on CUDA. Default: {default} sequence.",
        rich_help_panel="Limits",
    ),
]
MaxLoraRank = Annotated[
    int,
    typer.Option(
        "--maxLoraRank",
        min=0,
        max=1024,
        help="Take LoRA adapters up to this rank while the engine runs; a CPU needs "
        "edgellm's kernels. Default: {default}, no adapters.",
        rich_help_panel="Limits",
    ),
]
MaxLoras = Annotated[
    int | None,
    typer.Option(
        "--maxLoras",
        min=1,
        max=64,
        help="Keep at most this many adapters loaded on a GPU, with --maxLoraRank. Default: "
        "4 adapters; no limit on a CPU.",
        rich_help_panel="Limits",
    ),
]
Backend = Annotated[
    str,
    typer.Option(
        "--backend",
        help="Choose the library that runs the graphs: auto, onnxruntime or tensorrt.",
        rich_help_panel="Model",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        help="Choose the device of onnxruntime: cpu or cuda; tensorrt has cuda only. Default: cpu.",
        rich_help_panel="Model",
    ),
]
Threads = Annotated[
    int,
    typer.Option(
        "--threads",
        min=0,
        max=os.cpu_count(),
        help="Use this many CPU threads; 0 uses all cores. Default: {default} threads.",
        rich_help_panel="Limits",
    ),
]
Prefill = Annotated[
    str,
    typer.Option(
        "--prefill",
        help="Choose the prompt precision of quantized engines. int8 is faster, but keeps a "
        "second copy of the weights; same keeps one. auto takes int8 if the CPU has "
        "int8 dot products.",
        rich_help_panel="Model",
    ),
]
Kernels = Annotated[
    str,
    typer.Option(
        "--kernels",
        help="Choose the operators: edgellm, onnxruntime, tensorrt or auto. On a CPU, "
        "edgellm keeps one copy of the weights, and speculation does not change bits. "
        "In TensorRT, edgellm computes attention without copies of the KV cache. auto "
        "takes edgellm if available.",
        rich_help_panel="Model",
    ),
]
KvCache = Annotated[
    str,
    typer.Option(
        "--kvCache",
        help="Choose the type of the KV cache: float (as attention computes), float16 (CPU), "
        "bfloat16 (CPU), int8, int4 (CPU), fp8 (tensorrt) or auto. bfloat16 rounds queries and "
        "weights of attention, too. int4 has the last 128 positions in float16, "
        "and earlier ones in 4 bits with a scale for each 32 numbers. auto takes the "
        "checkpoint's calibrated type; else, on a CPU with integer weights, bfloat16 if the "
        "processor multiplies it, or float16.",
        rich_help_panel="Model",
    ),
]
Quantize = Annotated[
    str,
    typer.Option(
        "--quantize",
        help="Round float weights: int8 (one scale per output channel and activation row), "
        "int4 (blocks of 32), none or auto. auto rounds a draft to int8 if the CPU has "
        "int8 dot products.",
        rich_help_panel="Model",
    ),
]
EagleBase = Annotated[
    bool,
    typer.Option(
        "--eagleBase",
        "--specBase",
        help="Build the base of an EAGLE draft, which verifies trees.",
        rich_help_panel="Speculation",
    ),
]
EagleDraft = Annotated[
    bool,
    typer.Option(
        "--eagleDraft",
        "--specDraft",
        help="Build a draft, into the --engineDir of its base.",
        rich_help_panel="Speculation",
    ),
]
MaxVerifyTreeSize = Annotated[
    int | None,
    typer.Option(
        "--maxVerifyTreeSize",
        min=1,
        help="Verify trees of at most this many nodes, root included; without --eagleBase "
        "for drafters without hidden states. Default: with --eagleBase 60 nodes, or 16 for "
        "TensorRT with INT4 weights on Thor and Orin; else no trees.",
        rich_help_panel="Speculation",
    ),
]
MaxDraftTreeSize = Annotated[
    int,
    typer.Option(
        "--maxDraftTreeSize",
        min=1,
        help="Limit a draft's trees to this many nodes a round. Default: {default} nodes.",
        rich_help_panel="Speculation",
    ),
]
TargetSm = Annotated[
    str,
    typer.Option(
        "--gpu",
        help="Compile for the GPU of this compute capability, such as 8.9, ahead of time "
        "with TensorRT-RTX; implies --backend tensorrt. Default: this machine's GPU.",
        rich_help_panel="Model",
    ),
]
Workspace = Annotated[
    int,
    typer.Option(
        "--workspace",
        min=0,
        help="Limit TensorRT's scratch memory; 0 sets no limit. Default: {default} MiB.",
        rich_help_panel="Limits",
    ),
]
FallbackPrecision = Annotated[
    str,
    typer.Option(
        "--fallbackPrecision",
        help="Choose what fp8 and nvfp4 weights become on a GPU without them: int4 or fp16 "
        "(tensorrt). Default: an error.",
        rich_help_panel="Model",
    ),
]
Attention = Annotated[
    str,
    typer.Option(
        "--attention",
        help="Choose attention of onnxruntime on cuda: fused, plain or auto. fused is "
        "GroupQueryAttention in float16, from onnxruntime-gpu 1.31; plain is matrix "
        "products, from 1.23. auto takes fused if there is a kernel.",
        rich_help_panel="Model",
    ),
]
IntGemm = Annotated[
    str,
    typer.Option(
        "--intGemm",
        help="Multiply int4 and int8 weights in blocks of 32 by integer tensor-core GEMMs: "
        "on, off or auto (onnxruntime on cuda). auto takes on if trees of more than 16 "
        "nodes are verified.",
        rich_help_panel="Model",
    ),
]
OptLevel = Annotated[
    int | None,
    typer.Option(
        "--optLevel",
        min=0,
        max=5,
        help="Set the builder optimization level of TensorRT. Default: TensorRT's, usually 3.",
        rich_help_panel="Debug",
    ),
]
TimingCache = Annotated[
    Path | None,
    typer.Option(
        "--timingCache",
        help="Read and write TensorRT's timing cache in this file. Default: no file.",
        rich_help_panel="Output",
    ),
]
LayerReport = Annotated[
    bool,
    typer.Option(
        "--layerReport",
        "--profilingDetailed",
        help="Write all kernels and fusions of TensorRT to <graph>.layers.json.",
        rich_help_panel="Debug",
    ),
]
StripWeights = Annotated[
    bool,
    typer.Option(
        "--stripWeights",
        help="Compile a TensorRT plan without weights, which it is given from a file when "
        "loaded. Default: weights in the plan.",
        rich_help_panel="Output",
    ),
]
NoCheck = Annotated[
    bool,
    typer.Option(
        "--noCheck",
        help="Skip the comparison of the engine's logits with those of the bundle's graph.",
        rich_help_panel="Debug",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dryRun",
        "--dry-run",
        help="Predict sizes and speed, report exceeded limits, and build nothing.",
        rich_help_panel="Debug",
    ),
]
