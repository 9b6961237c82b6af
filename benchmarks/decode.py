"""Decode and prefill speed of edgellm, llama.cpp and onnxruntime-genai.

    pip install -e '.[dev]' -r benchmarks/requirements.txt
    python benchmarks/decode.py smollm2 --rounds 5
    python benchmarks/decode.py shape --shape qwen2.5-0.5b     # random weights
    python benchmarks/decode.py qwen3.5     # the shape of its 0.8B model; gemma4: E2B's
    python benchmarks/decode.py long --contexts 4096 16384     # a Q4_K_M file, longer contexts
    python benchmarks/decode.py sizes --sizes qwen3-0.6b 8b     # Q4_0 files, and v(M)

All engines have the same weights, the same number of threads, a 512-token context and batch 1.
Every engine runs in its own process; they alternate for several rounds. The share of the memory
bandwidth is the rate of loading a token's weights, over that of loading a large array with as many
threads between the rounds. Load time is without imports; anonymous memory includes the KV cache,
resident memory also the parts of mapped files that were read.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from harness import command
from harness.models import checkpoints, engines, random_gguf, random_weights
from harness.processes.pass_process import CONTEXT, EXTRA_SLOTS, Process
from harness.results import Report
from harness.timing import alternating, speedup

from edgellm.scripts import smollm2

READ_BYTES = 1 << 28
KERNELS = ("edgellm", "onnxruntime")
DECODED = 48  # tokens of a round
LONG_DECODED = 24
LLAMA_CPP = ("llama.cpp", "llama.cpp, flash attention")
COLUMNS = ("engine", "decode tokens/s", "prefill tokens/s", "share of the memory bandwidth")

# The text model of Qwen3.5-0.8B, by its published sizes.
QWEN3_5: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "full_attention_interval": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
    },
}
QUICK = {"num_hidden_layers": 4, "vocab_size": 49152}

Models = dict[str, tuple[str, str, Path]]  # by label: python, kind of `pass_process`, path


def show_smollm2(given: argparse.Namespace, report: Report) -> None:
    """Measure SmolLM2-135M."""
    models: Models = {}
    pairs: list[tuple[str, str]] = []
    for stored in ("int4",) if given.quick else ("int4", "int4_b128", "fp32"):
        checkpoint = checkpoints.smollm2_folder(given.work, stored)
        for kernels in KERNELS if stored != "fp32" else KERNELS[:1]:
            plan = engines.plan_of(given.threads, kernels=kernels if stored != "fp32" else "auto")
            engine = engines.plain_engine(checkpoint, f"{kernels}-{given.threads}", plan)
            models[_label(stored, kernels)] = sys.executable, "edgellm", engine
        if stored != "fp32":
            pairs.append((_label(stored, KERNELS[0]), _label(stored, KERNELS[1])))
    if not given.quick:
        peers = _peers(given, checkpoints.smollm2_folder(given.work, "fp32"), smollm2.fetch())
        models |= peers
        pairs += [(_label("int4", KERNELS[0]), peer) for peer in peers if "Q8_0" not in peer]
    _compare("smollm2", models, pairs, given, report)


def show_shape(given: argparse.Namespace, report: Report) -> None:
    """Measure random weights of a shape."""
    shape = "small" if given.quick else given.shape
    checkpoint = engines.random_checkpoint(given.work, shape)
    models: Models = {}
    pairs: list[tuple[str, str]] = []
    for quantize in ("int4",) if given.quick else ("int4", "int8"):
        for kernels in KERNELS:
            plan = engines.plan_of(given.threads, quantize, kernels)
            name = f"{quantize}-{kernels}-{given.threads}"
            engine = engines.plain_engine(checkpoint, name, plan)
            models[_label(quantize, kernels)] = sys.executable, "edgellm", engine
        pairs.append((_label(quantize, KERNELS[0]), _label(quantize, KERNELS[1])))
    if not given.quick:
        peers = _peers(given, checkpoint, None)
        models |= peers
        for peer in peers:
            quantize = "int8" if "Q8_0" in peer else "int4"
            pairs.append((_label(quantize, KERNELS[0]), peer))
    _compare(shape, models, pairs, given, report)


def show_qwen3_5(given: argparse.Namespace, report: Report) -> None:
    """Measure a GGUF file of Qwen3.5-0.8B's shape, which all engines read."""
    config = {**QWEN3_5, **(QUICK if given.quick else {})}
    path = given.work / f"qwen3.5-{config['num_hidden_layers']}.gguf"
    if not path.exists():
        partial = path.with_suffix(".partial")
        random_gguf.write_qwen3_5(config, smollm2.fetch(), partial)
        partial.replace(path)
    plan = engines.plan_of(given.threads)
    engine = engines.plain_engine(path, f"edgellm-{given.threads}", plan, "fp16")  # keeps blocks
    models: Models = {"edgellm": (sys.executable, "edgellm", engine)}
    if not given.quick and command.has_package("llama_cpp", given.llama_python):
        models["llama.cpp"] = given.llama_python, "llama.cpp", path
    _compare("qwen3.5-0.8b", models, [("edgellm", peer) for peer in models][1:], given, report)


def show_long(given: argparse.Namespace, report: Report) -> None:
    """Measure a Q4_K_M file of a shape after prompts of several lengths."""
    checkpoint = engines.random_checkpoint(given.work, "small" if given.quick else given.shape)
    if given.quick or not command.has_package("llama_cpp", given.llama_python):
        path, kinds = checkpoint, ("edgellm",)
    else:
        source = _random_gguf(checkpoint)
        folder = checkpoint.with_name(f"{checkpoint.name}-gguf")
        path = checkpoints.gguf(source, folder, "Q4_K_M", given.llama_python, mixed=True)
        kinds = ("edgellm", *LLAMA_CPP)
    rows = []
    for context in given.contexts[:1] if given.quick else given.contexts:
        plan = engines.plan_of(given.threads, kv_capacity=context + EXTRA_SLOTS)
        engine = engines.plain_engine(path, f"edgellm-{given.threads}-{context}", plan, "fp16")
        running = {
            kind: Process(
                sys.executable if kind == "edgellm" else given.llama_python,
                kind,
                engine if kind == "edgellm" else path,
                given.threads,
                context=context,
            )
            for kind in kinds
        }
        times: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
        for number in range(given.rounds):
            turn = number % len(kinds)
            for kind in kinds[turn:] + kinds[:turn]:
                times[kind].append(running[kind].measure("both", LONG_DECODED))
        for process in running.values():
            process.close()
        rows += _long_rows(context, times)
        print("\n".join(" ".join(row) for row in rows[-len(kinds) :]), flush=True)
    columns = ("context", "engine", "prefill tokens/s", "decode tokens/s", "prefill", "decode")
    report.add(f"decode-long-{given.shape}", columns, rows)


def _long_rows(context: int, times: dict[str, list[list[float]]]) -> list[list[str]]:
    """Return rows of one context: speeds, and edgellm's lead over a peer in each round."""
    prefill = {kind: [each[0] for each in found] for kind, found in times.items()}
    decode = {
        kind: [statistics.median(each[1:]) for each in found] for kind, found in times.items()
    }
    rows = []
    for kind in times:
        speeds = (
            f"{context / statistics.median(prefill[kind]) * 1e3:.0f}",
            f"{1e3 / statistics.median(decode[kind]):.1f}",
        )
        leads = [
            "" if kind == "edgellm" else f"{speedup(found['edgellm'], found[kind]):.2f} x"
            for found in (prefill, decode)
        ]
        rows.append([f"{context}", kind, *speeds, *leads])
    return rows


def show_gemma4(given: argparse.Namespace, report: Report) -> None:
    """Measure GGUF files of Gemma 4 E2B's shape: matrices in 4.5 and in 3.4 bits a weight."""
    shape = "gemma-4-small" if given.quick else "gemma-4-e2b"
    models: Models = {}
    for kind in ("Q4_0", "Q3_K"):
        path = given.work / f"{shape}-{kind}.gguf"
        if not path.exists():
            partial = path.with_suffix(".partial")
            config = random_weights.GEMMA_4[shape]
            random_gguf.write_gemma4(config, smollm2.fetch(), kind, partial)
            partial.replace(path)
        plan = engines.plan_of(given.threads)
        engine = engines.plain_engine(path, f"edgellm-{given.threads}", plan, "fp16")
        models[f"edgellm {kind}"] = sys.executable, "edgellm", engine
        if not given.quick and command.has_package("llama_cpp", given.llama_python):
            models[f"llama.cpp {kind}"] = given.llama_python, "llama.cpp", path
    pairs = [(f"edgellm {name.split()[1]}", name) for name in models if "llama" in name]
    _compare(shape, models, pairs, given, report)


def show_sizes(given: argparse.Namespace, report: Report) -> None:
    """Measure Q4_0 files of larger shapes, and passes of several tokens: v(M) of one token."""
    rows = []
    for shape in ["small"] if given.quick else given.sizes:
        path, config = engines.random_q4_0(given.work, shape), random_weights.SHAPES[shape]
        plan = engines.plan_of(given.threads)
        engine = engines.plain_engine(path, f"edgellm-{given.threads}", plan, "fp16")
        models: Models = {"edgellm": (sys.executable, "edgellm", engine)}
        if not given.quick and command.has_package("llama_cpp", given.llama_python):
            models |= {kind: (given.llama_python, kind, path) for kind in LLAMA_CPP}
        rows += _size_rows(shape, config, models, given)
    heads = ("shape", "engine", "prefill tokens/s", "decode tokens/s", "prefill", "decode")
    report.add("decode-sizes", (*heads, "prefill TOPS", "v(8)", "v(16)"), rows)


def _size_rows(
    shape: str, config: dict[str, Any], models: Models, given: argparse.Namespace
) -> list[list[str]]:
    """Return rows of one shape; the leads of edgellm and v(M) are of each round."""
    running = {
        kind: Process(python, kind, path, given.threads)
        for kind, (python, _, path) in models.items()
    }
    found = {}
    for name, line in (
        ("prefill", f"prefill {CONTEXT}"),
        ("decode", f"decode {LONG_DECODED}"),
        ("v(8)", "verify 8"),
        ("v(16)", "verify 16"),
    ):
        calls = {
            kind: lambda p=p, line=line: statistics.median(p.ask(line))
            for kind, p in running.items()
        }
        found[name] = alternating(calls, given.rounds)
    for process in running.values():
        process.close()
    operations = 2 * sum(int(np.prod(each)) for each in random_weights.matrices(config).values())
    rows = []
    for kind in models:
        prefill, decode = (statistics.median(found[name][kind]) for name in ("prefill", "decode"))
        rate = CONTEXT / prefill * 1e3
        leads = [
            "" if kind == "edgellm" else f"{speedup(times['edgellm'], times[kind]):.2f} x"
            for times in (found["prefill"], found["decode"])
        ]
        costs = [
            f"{speedup(found['decode'][kind], found[name][kind]):.2f}" for name in ("v(8)", "v(16)")
        ]
        speeds = [f"{rate:.0f}", f"{1e3 / decode:.1f}"]
        rows.append([shape, kind, *speeds, *leads, f"{operations * rate / 1e12:.2f}", *costs])
    return rows


MODES = {
    "smollm2": show_smollm2,
    "shape": show_shape,
    "qwen3.5": show_qwen3_5,
    "gemma4": show_gemma4,
    "long": show_long,
    "sizes": show_sizes,
}


def _label(precision: str, kernels: str) -> str:
    return f"edgellm {precision}, {kernels}'s kernels"


def _peers(given: argparse.Namespace, checkpoint: Path, source: Path | None) -> Models:
    """Make missing models of installed libraries; `source`: a GGUF file of the weights."""
    models: Models = {}
    if command.has_package("llama_cpp", given.llama_python):
        source = source or _random_gguf(checkpoint)
        folder = checkpoint.with_name(f"{checkpoint.name}-gguf")
        for kind in ("Q4_0", "Q8_0"):
            path = checkpoints.gguf(source, folder, kind, given.llama_python)
            models[f"llama.cpp {kind}"] = given.llama_python, "llama.cpp", path
    if command.has_package("onnxruntime_genai"):
        folder = checkpoint.with_name(f"{checkpoint.name}-genai")
        path = checkpoints.genai(checkpoint, folder, sys.executable)
        models["onnxruntime-genai int4, block 32"] = sys.executable, "genai", path
    return models


def _random_gguf(checkpoint: Path) -> Path:
    """Return a GGUF file of a checkpoint's weights, which is written once."""
    path = checkpoint.with_name(f"{checkpoint.name}.gguf")
    if not path.exists():
        partial = path.with_suffix(".partial")
        random_gguf.write(checkpoint, smollm2.fetch(), partial)
        partial.replace(path)
    return path


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


def _compare(
    name: str,
    models: Models,
    pairs: list[tuple[str, str]],
    given: argparse.Namespace,
    report: Report,
) -> None:
    """Measure all models in alternating rounds; report speeds, and ratios of each round."""
    running = {
        label: Process(python, kind, path, given.threads)
        for label, (python, kind, path) in models.items()
    }
    decoded = 8 if given.quick else DECODED
    prefill = alternating(
        {label: lambda p=p: p.measure("prefill", CONTEXT)[0] for label, p in running.items()},
        given.rounds,
    )
    calls = {
        label: lambda p=p: statistics.median(p.measure("decode", decoded))
        for label, p in running.items()
    }
    decode = alternating({**calls, "memory": lambda: bytes_per_s(given.threads)}, given.rounds)
    resident = {label: process.resident_bytes() for label, process in running.items()}
    for process in running.values():
        process.close()
    rate = statistics.median(decode["memory"])
    rows = []
    for label, (_, _, path) in models.items():
        step, prompt = statistics.median(decode[label]), statistics.median(prefill[label])
        _, ready, anonymous = running[label].opening
        read = token_bytes(path)
        share = f"{read / step * 1e5 / rate:.0f} %" if read else ""
        speeds = [f"{1e3 / step:.1f}", f"{CONTEXT / prompt * 1e3:.0f}", share]
        memory = f"{anonymous / 1e6:.0f}", f"{resident[label] / 1e6:.0f}"
        rows.append([label, *speeds, f"{ready:.2f}", *memory])
    columns = (*COLUMNS, "load s", "anonymous MB", "resident MB")
    report.add(f"decode-{name}", columns, rows)
    ratios = [
        [ours, theirs, *(f"{speedup(times[ours], times[theirs]):.2f} x" for times in found)]
        for found in [(decode, prefill)]
        for ours, theirs in pairs
    ]
    if ratios:
        report.add(f"decode-{name}-speedup", ("edgellm", "against", "decode", "prefill"), ratios)


def main() -> None:
    parser = command.parser(__doc__, MODES, rounds=7)
    parser.add_argument("--shape", choices=random_weights.SHAPES, default="qwen2.5-0.5b")
    parser.add_argument(
        "--sizes",
        choices=random_weights.SHAPES,
        nargs="+",
        default=["qwen3-0.6b", "1b", "qwen3-4b", "8b"],
        help="shapes of `sizes`",
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument(
        "--llama_python", default=sys.executable, help="a python with llama-cpp-python"
    )
    command.run(parser, MODES)


if __name__ == "__main__":
    main()
