"""Decode and prefill speed of edgellm, llama.cpp and onnxruntime-genai.

    pip install -e '.[dev]' -r benchmarks/requirements.txt
    python benchmarks/decode.py

All engines have the same weights (SmolLM2-135M-Instruct), the same number of threads, a 512-token
context and batch 1. Every engine runs in its own process; they alternate for several rounds.
`--shape` uses random weights of a larger model. "of memory" is the rate of loading a token's
weights, over that of loading a large array with as many threads between the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
from harness import checkpoints, random_gguf, random_weights
from harness.pass_process import CAPACITY, CONTEXT, Process

from edgellm.build.engine import build_engine
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.resolve import open_checkpoint
from edgellm.scripts import smollm2

READ_BYTES = 1 << 28
THEIRS = ", ONNX Runtime's kernels"


def prepare(work: Path, llama_python: str, threads: int) -> dict[str, tuple[str, str, Path]]:
    """Make all missing models: name -> (python, kind, path)."""
    source = smollm2.fetch()
    work.mkdir(parents=True, exist_ok=True)
    models: dict[str, tuple[str, str, Path]] = {}
    for name, block in (("int4 b32", 32), ("int4 b128", 128), ("fp32", 0)):
        checkpoint = work / name.replace(" ", "_")
        if not checkpoint.exists():
            make = checkpoints.round_checkpoint if block else checkpoints.float_checkpoint
            make(str(source), checkpoint, *([block] if block else []))
        for kernels in ("edgellm", "onnxruntime") if block else ("auto",):
            engine = work / f"{checkpoint.name}-{kernels}-{threads}"
            if not engine.exists():
                _build(checkpoint, engine, threads, "auto", "auto", kernels)
            label = f"edgellm {name}" + (THEIRS if kernels == "onnxruntime" else "")
            models[label] = (sys.executable, "edgellm", engine)
    for kind in ("Q4_0", "Q8_0"):
        path = checkpoints.gguf(source, work, kind, llama_python)
        models[f"llama.cpp {kind}"] = (llama_python, "llama.cpp", path)
    genai = checkpoints.genai(work / "fp32", work / "genai", sys.executable)
    models["onnxruntime-genai int4 b32"] = (sys.executable, "genai", genai)
    return models


def prepare_shape(
    work: Path, shape: str, llama_python: str, threads: int
) -> dict[str, tuple[str, str, Path]]:
    """Make models of random weights, as `prepare`."""
    work.mkdir(parents=True, exist_ok=True)
    checkpoint = work / shape
    if not checkpoint.exists():
        random_weights.write(random_weights.SHAPES[shape], checkpoint, "F32")
        for name, data in open_checkpoint(str(smollm2.fetch())).tokenizer_files.items():
            (checkpoint / name).write_bytes(data)
    models = {}
    for quantize in ("int4", "int8"):
        for kernels in ("edgellm", "onnxruntime"):
            engine = work / f"{shape}-{quantize}-{kernels}-{threads}"
            if not engine.exists():
                _build(checkpoint, engine, threads, "auto", quantize, kernels)
            models[f"{quantize}, {kernels}'s kernels"] = (sys.executable, "edgellm", engine)
    floats = work / f"{shape}.gguf"
    if not floats.exists():
        partial = floats.with_suffix(".partial")
        random_gguf.write(checkpoint, smollm2.fetch(), partial)
        partial.replace(floats)
    for kind in ("Q4_0", "Q8_0"):
        path = checkpoints.gguf(floats, work / f"{shape}-gguf", kind, llama_python)
        models[f"llama.cpp {kind}"] = (llama_python, "llama.cpp", path)
    genai = checkpoints.genai(checkpoint, work / f"{shape}-genai", sys.executable)
    models["onnxruntime-genai int4 b32"] = (sys.executable, "genai", genai)
    return models


def _build(
    checkpoint: Path,
    engine: Path,
    threads: int,
    prefill: str,
    quantize: str = "auto",
    kernels: str = "auto",
) -> None:
    bundle = checkpoint.with_name(f"{checkpoint.name}-bundle")
    if not bundle.exists():
        export_llm(open_checkpoint(str(checkpoint)), bundle, ExportOptions("fp32"))
    plan = Plan(1024, CAPACITY, threads, prefill, quantize, options=CpuOptions(kernels))
    build_engine("llm", bundle, engine, plan, "onnxruntime", lambda _: None)


def bytes_per_s(threads: int) -> float:
    """Return the rate at which threads load an array larger than the caches; the best of three."""
    parts = np.array_split(np.ones(READ_BYTES // 4, np.int32), threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(3):
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, time.perf_counter() - start)
    return READ_BYTES / best


def token_bytes(engine: Path) -> int:
    """Return the bytes of packed weights that a token loads; 0 if the engine has none."""
    path = engine / "decode.onnx"
    if not path.exists():
        return 0
    graph = onnx.load(path, load_external_data=False).graph
    packed = {node.input[1] for node in graph.node if node.op_type == "QuantLinear"}
    return sum(int(np.prod(each.dims)) for each in graph.initializer if each.name in packed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=smollm2.cache_folder() / "benchmarks")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--llama_python", default=sys.executable, help="a python with llama-cpp-python"
    )
    parser.add_argument(
        "--shape",
        choices=random_weights.SHAPES,
        help="random weights of this shape; default: SmolLM2",
    )
    arguments = parser.parse_args()
    if arguments.shape:
        models = prepare_shape(
            arguments.work, arguments.shape, arguments.llama_python, arguments.threads
        )
    else:
        models = prepare(arguments.work, arguments.llama_python, arguments.threads)
    processes = {
        name: Process(python, kind, path, arguments.threads)
        for name, (python, kind, path) in models.items()
    }
    prefill: dict[str, list[float]] = {name: [] for name in models}
    decode: dict[str, list[float]] = {name: [] for name in models}
    rates: list[float] = []
    for _ in range(arguments.rounds):
        rates.append(bytes_per_s(arguments.threads))
        for name, process in processes.items():
            prefill[name] += process.measure("prefill", CONTEXT)
            decode[name].append(statistics.median(process.measure("decode", 48)))
    for process in processes.values():
        process.close()
    print(
        f"{arguments.threads} threads, {CONTEXT}-token prompt, median of {arguments.rounds} rounds"
    )
    rate = statistics.median(rates)
    print(f"they read {rate / 1e9:.1f} GB/s; ready: after imports; anonymous memory with KV cache")
    print(
        f"{'engine':32} {'decode tok/s':>13} {'ms':>7} {'prefill tok/s':>14} {'of memory':>9} "
        f"{'imports s':>9} {'ready s':>8} {'anon. MB':>9}"
    )
    for name, (_, _, path) in models.items():
        step, prompt = statistics.median(decode[name]), statistics.median(prefill[name])
        imports, ready, anonymous = processes[name].opening
        read = token_bytes(path)
        share = f"{read / step * 1e3 / rate:.0%}" if read else ""
        print(
            f"{name:32} {1e3 / step:13.1f} {step:7.2f} {CONTEXT / prompt * 1e3:14.0f} {share:>9} "
            f"{imports:9.2f} {ready:8.2f} {anonymous / 1e6:9.0f}"
        )
    _ratios(decode, prefill, pairs_of_shape() if arguments.shape else pairs_of_smollm2())


def pairs_of_shape() -> list[tuple[str, str]]:
    """Return the compared pairs of random weights."""
    ours = {q: f"{q}, edgellm's kernels" for q in ("int4", "int8")}
    pairs = [(name, f"{q}, onnxruntime's kernels") for q, name in ours.items()]
    pairs += [(ours["int4"], peer) for peer in ("onnxruntime-genai int4 b32", "llama.cpp Q4_0")]
    return [*pairs, (ours["int8"], "llama.cpp Q8_0")]


def pairs_of_smollm2() -> list[tuple[str, str]]:
    """Return the compared pairs of SmolLM2."""
    ours = "edgellm int4 b32"
    peers = (f"{ours}{THEIRS}", "onnxruntime-genai int4 b32", "llama.cpp Q4_0")
    coarse = "edgellm int4 b128", f"edgellm int4 b128{THEIRS}"
    return [*((ours, peer) for peer in peers), coarse]


def _ratios(
    decode: dict[str, list[float]], prefill: dict[str, list[float]], pairs: list[tuple[str, str]]
) -> None:
    """Print medians of the ratios of each round."""
    for ours, peer in pairs:
        speed = [
            statistics.median(p / o for p, o in zip(table[peer], table[ours], strict=True))
            for table in (decode, prefill)
        ]
        print(f"{ours} / {peer}: decode {speed[0]:.2f} x, prefill {speed[1]:.2f} x")


if __name__ == "__main__":
    main()
