"""A mixture-of-experts model against a dense model with as many active weights.

    python benchmarks/moe_and_hybrids.py --layers 12 --work /somewhere/with/10GB
    python benchmarks/moe_and_hybrids.py --layers 48 --threads 1 --work /dev/shm/moe --budget_s 450
    python benchmarks/moe_and_hybrids.py --layers 12 --threads 1 --llama_python PYTHON
    python benchmarks/moe_and_hybrids.py --operator

The shapes are those of Qwen3-30B-A3B (48 layers, 8 of 128 experts a token) and Qwen2.5-3B (36
layers, dense); `--layers` takes a part of both. Weights are random INT4 in blocks of 32, in the
kernels' layout: only their size and place matter. Tokens are random, and so are their experts. All
48 layers are 17 GB: on a slow disk that is most of the time, in memory (a tmpfs) it is a minute.
Each round is printed when it is finished; no round starts that would end after `--budget_s`. With
`--threads 1` times are CPU times, which other programs hardly change. `--operator` compares the
experts of one layer with ONNX Runtime's QMoE. With `--llama_python`, a python with
llama-cpp-python, llama.cpp decodes in the same rounds with random Q4_0 blocks of that shape; its
times are wall-clock times.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from harness import random_gguf
from harness.pass_process import Process

from edgellm.build.lowering.experts import touched
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.onnxruntime_cpu.edgellm_kernels import experts, linears
from edgellm.build.onnxruntime_cpu.linears import COARSE_INPUTS
from edgellm.build.onnxruntime_cpu.lower import lower
from edgellm.core.model_spec import DecoderSpec, KVCacheSpec, PageSpec
from edgellm.device_runtime.kernels.pack import PackedForm
from edgellm.device_runtime.networks.decoder import DecoderNetwork
from edgellm.device_runtime.runners.onnxruntime_cpu.runner import LoadedGraph, open_runner
from edgellm.device_runtime.runners.onnxruntime_graphs import load_graph
from edgellm.export import models
from edgellm.export.checkpoints.hf import TensorInfo
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.graph.bundle_files import DTYPES
from edgellm.export.graph.decoder import build_decoder
from edgellm.scripts import smollm2

CAPACITY, CONTEXT, ROWS, DECODED = 1024, 512, (1, 2, 4, 8, 16), 12
_SHARED = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "head_dim": 128,
}
SHAPES: dict[str, dict[str, Any]] = {
    "30B-A3B": {
        **_SHARED, "model_type": "qwen3_moe", "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "intermediate_size": 6144, "norm_topk_prob": True,
    },
    "dense 3B": {
        **_SHARED, "model_type": "qwen2", "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "intermediate_size": 11008,
    },
}  # fmt: skip


class Declared:
    """A `TensorSource` without tensors."""

    def infos(self) -> Mapping[str, TensorInfo]:
        return {}

    def stream(self, name: str) -> Iterator[memoryview]:
        raise NotImplementedError(name)


class DeclaredWeights(Weights):
    """All requested tensors, in bfloat16 and without contents."""

    def __truediv__(self, name: str) -> Weights:
        return DeclaredWeights(source=Declared(), prefix=f"{self.prefix}{name}.")

    def _checked(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        del name
        return TensorInfo("BF16", shape)


def config_of(name: str, layers: int) -> dict[str, Any]:
    """Return a shape with `layers` of 48 layers, and the same share of the vocabulary."""
    config = dict(SHAPES[name])
    part = layers / 48
    for key in ("num_hidden_layers", "vocab_size"):
        config[key] = max(1, round(config[key] * part))
    return config


def contents(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the contents of unpacked tensors."""
    if len(shape) == 3:
        return np.zeros(shape, ir.DataType.BFLOAT16.numpy())  # of packed experts: never read
    random = np.random.default_rng(len(name))
    values = np.ones(shape) if "norm" in name else random.standard_normal(shape, np.float32)
    return values.astype(ir.DataType.BFLOAT16.numpy())


def random_records(form: PackedForm, *_: object) -> Iterator[bytes]:
    """Yield packed random values, all with one scale."""
    yield form.header(2.0**-9)
    random = np.random.default_rng(form.in_features + form.out_features)
    some = random.integers(0, 256, (4096, form.record_bytes), np.uint8)
    if form.is_quantized:
        some[:, -64:] = np.full(32, 1, np.float16).view(np.uint8)
    block, left = some.tobytes(), form.num_bytes - 64
    while left > 0:
        yield block[:left]
        left -= len(block)


def make(name: str, layers: int, folder: Path) -> None:
    """Write the graph and its packed weights."""
    config = config_of(name, layers)
    architecture = models.find(config["model_type"])
    facts: DecoderConfig = architecture.Config.from_hf(ConfigReader(config))
    model, op, _ = build_decoder(
        architecture, facts, DeclaredWeights(source=Declared()), DTYPES["fp32"]
    )
    for value, stored in op.parameters.values():
        value.const_value = ir.LazyTensor(
            lambda stored=stored: ir.tensor(contents(stored.name, stored.shape)),
            dtype=stored.dtype,
            shape=ir.Shape(stored.shape),
            name=stored.name,
        )
    experts.packed_bytes = linears.packed_bytes = random_records  # type: ignore[assignment]
    folder.mkdir(parents=True)
    weights = WeightFile(folder / "decode.data")
    kernel = linears.OwnLinears(rounds="int4", one_term=COARSE_INPUTS)
    lower(model, kernel, weights, cache_of(facts), CAPACITY)
    weights.close()
    ir.save(model, folder / "decode.onnx")


def cache_of(facts: DecoderConfig) -> KVCacheSpec:
    layers = facts.num_hidden_layers
    pages = PageSpec(256, (0,) * layers)  # none with a window
    return KVCacheSpec(
        num_layers=layers,
        num_kv_heads=facts.num_key_value_heads,
        head_dim=facts.head_dim,
        dtype="float32",
        pages=pages,
    )


def measure(name: str, layers: int, folder: Path, threads: int) -> dict[str, float]:
    """Measure load and forward passes of one model, in its own process."""
    config = config_of(name, layers)
    facts = models.find(config["model_type"]).Config.from_hf(ConfigReader(config))
    spec = DecoderSpec(
        model_type=config["model_type"],
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        max_positions=CAPACITY,
        num_parameters=0,
        kv=cache_of(facts),
    )
    start = time.perf_counter()
    graph = load_graph(folder / "decode.onnx", threads=threads, own_kernels=True)
    session = DecoderNetwork(
        runner=open_runner([LoadedGraph(graph)], spec.kv, CAPACITY), spec=spec, capacity=CAPACITY
    )
    found = {"load_s": time.perf_counter() - start}
    random = np.random.default_rng(0)

    clock = time.process_time if threads == 1 else time.perf_counter

    def run(rows: int, begin: int) -> float:
        ids = random.integers(0, spec.vocab_size, rows)
        start = clock()
        session.run(ids, begin, np.arange(rows))
        return (clock() - start) * 1e3

    for begin in range(0, CONTEXT, 64):
        run(64, begin)
    found |= {"anonymous_mb": memory_kb("RssAnon") / 1e3, "mapped_mb": memory_kb("RssFile") / 1e3}
    for rows in ROWS:
        times = [run(rows, CONTEXT) for _ in range(DECODED)]
        found[f"ms_{rows}"] = statistics.median(times)
        found[f"best_ms_{rows}"] = min(times)
    return found


def memory_kb(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def llama_cpp_ms(layers: int, work: Path, threads: int, python: str) -> float:
    """Return llama.cpp's milliseconds a token of the MoE model, after `CONTEXT` tokens."""
    path = work / f"mixture-{layers}.gguf"
    if not path.exists():
        partial = path.with_suffix(".partial")
        random_gguf.write_mixture(config_of("30B-A3B", layers), smollm2.fetch(), partial)
        partial.replace(path)
    process = Process(python, "llama.cpp", path, threads)
    found = statistics.median(process.measure("decode", DECODED))
    process.close()
    return found


def compare(
    layers: int, work: Path, threads: int, rounds: int, budget_s: float, llama_python: str
) -> None:
    """Compare both models, which alternate in new processes."""
    begin = time.perf_counter()
    results: dict[str, list[dict[str, float]]] = {name: [] for name in SHAPES}
    for name in SHAPES:
        folder = work / f"{name.replace(' ', '-')}-{layers}"
        start = time.perf_counter()
        if not folder.exists():
            made = folder.with_suffix(".partial")
            shutil.rmtree(made, ignore_errors=True)
            make(name, layers, made)
            made.replace(folder)
        size = sum(path.stat().st_size for path in folder.iterdir())
        took = time.perf_counter() - start
        print(f"{name}, {layers} of 48 layers: {size / 1e9:.2f} GB in {took:.0f} s", flush=True)
    longest = 0.0
    for _ in range(rounds):
        start = time.perf_counter()
        if results["dense 3B"] and start - begin + longest > budget_s:
            break
        for name in SHAPES:
            folder = work / f"{name.replace(' ', '-')}-{layers}"
            command = [sys.executable, __file__, "--measure", name, "--layers", str(layers)]
            said = subprocess.run(
                [*command, "--work", str(folder), "--threads", str(threads)],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
            pairs = (line.split("=") for line in said.splitlines() if "=" in line)
            results[name].append({key: float(value) for key, value in pairs})
        _say(results)
        if llama_python:
            theirs = llama_cpp_ms(layers, work, threads, llama_python)
            ours = results["30B-A3B"][-1]["ms_1"]
            print(f"llama.cpp: a token of the mixture {theirs:.1f} ms, edgellm {ours:.1f} ms")
        longest = max(longest, time.perf_counter() - start)


def _say(results: Mapping[str, list[dict[str, float]]]) -> None:
    """Print the best of all rounds so far."""
    print(f"after {len(results['dense 3B'])} rounds:")
    for name, found in results.items():
        best = {key: min(each[key] for each in found) for key in found[0]}
        v = {rows: best[f"ms_{rows}"] / best["ms_1"] for rows in ROWS}
        print(
            f"{name}: load {best['load_s']:.2f} s, {best['anonymous_mb']:.0f} MB anonymous, "
            f"{best['mapped_mb']:.0f} MB mapped; decode {1e3 / best['ms_1']:.2f} tokens/s; "
            + ", ".join(f"v({rows}) {ratio:.2f}" for rows, ratio in v.items())
        )
    pairs = zip(*results.values(), strict=True)
    ratios = [mixture["ms_1"] / dense["ms_1"] for mixture, dense in pairs]
    print(f"a token of the mixture takes {statistics.median(ratios):.2f} x the dense model's time")
    counts = ", ".join(f"{rows} rows: {touched(128, 8, rows):.0f}" for rows in ROWS)
    print(f"experts of 128 that random rows touch: {counts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12, help="of 48")
    parser.add_argument("--work", type=Path, default=Path("moe-benchmark"))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget_s", type=float, default=450.0)
    parser.add_argument("--llama_python", default="")
    parser.add_argument("--operator", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.operator:
        import moe_operator

        moe_operator.compare(flags.threads)
    elif flags.measure:
        found = measure(flags.measure, flags.layers, flags.work, flags.threads)
        print(*(f"{key}={value}" for key, value in found.items()), sep="\n")
    else:
        compare(
            flags.layers, flags.work, flags.threads, flags.rounds, flags.budget_s,
            flags.llama_python,
        )  # fmt: skip


if __name__ == "__main__":
    main()
