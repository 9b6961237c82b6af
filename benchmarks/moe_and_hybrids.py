"""Mixtures of experts, recurrent layers and sliding windows.

    python benchmarks/moe_and_hybrids.py moe --layers 12          # 10 GB of disk
    python benchmarks/moe_and_hybrids.py moe --layers 48 --threads 1 --work /dev/shm/moe
    python benchmarks/moe_and_hybrids.py moe --layers 12 --threads 1 --llama_python PYTHON
    python benchmarks/moe_and_hybrids.py operator --threads 1
    python benchmarks/moe_and_hybrids.py tree
    python benchmarks/moe_and_hybrids.py turns                    # 2 GB of disk

`moe`: a mixture-of-experts model against a dense model with as many active weights. The shapes are
those of Qwen3-30B-A3B (48 layers, 8 of 128 experts a token) and Qwen2.5-3B (36 layers, dense);
`--layers` takes a part of both. Weights are random INT4 in blocks of 32, in the kernels' layout:
only their size and place matter. Tokens are random, and so are their experts. All 48 layers are
17 GB: on a slow disk that is most of the time, in memory (a tmpfs) it is a minute. With one thread
times are CPU times, which other programs hardly change. With `--llama_python`, a python with
llama-cpp-python, llama.cpp decodes in the same rounds with random Q4_0 blocks of that shape; its
times are wall-clock times. `operator`: the experts of one layer, and ONNX Runtime's QMoE, which
chooses the experts itself; edgellm's operator gets them as input.

`tree`: a forward pass over 14 nodes in some layers of Qwen3.5-4B's shape, with random INT4 weights.
It compares the bytes stored for each node until acceptance with those of a sequence's states, and
measures the growth of the process. `turns`: a conversation of 4096 tokens with some layers of the
shapes of LFM2-350M and Gemma 3 1B, with random 8-bit weights; the profile of the second turn counts
its computed tokens.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from harness import command
from harness.models import random_gguf
from harness.models.engines import silent
from harness.processes.pass_process import Process
from harness.results import Report
from harness.timing import alternating, clock_of, elapsed_ms, folder_bytes, memory_bytes
from onnx import helper, numpy_helper

from edgellm.build.engine import build_engine
from edgellm.build.lowering.experts import touched
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.onnxruntime_cpu.commit_graph import compile_commit
from edgellm.build.onnxruntime_cpu.edgellm_kernels import experts, linears
from edgellm.build.onnxruntime_cpu.linears import COARSE_INPUTS
from edgellm.build.onnxruntime_cpu.lower import lower
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.core.model_spec import DecoderSpec, KVCacheSpec, PageSpec
from edgellm.device_runtime import LLM, SamplingParams
from edgellm.device_runtime.api.generation_request import GenerationRequest
from edgellm.device_runtime.kernels.library import DOMAIN, register
from edgellm.device_runtime.kernels.packed_layout import PackedForm
from edgellm.device_runtime.networks.decoder import DecoderNetwork
from edgellm.device_runtime.runners.onnxruntime_cpu.runner import LoadedGraph, open_runner
from edgellm.device_runtime.runners.onnxruntime_graphs import GraphOptions, load_graph
from edgellm.export import models
from edgellm.export.checkpoints.checkpoint import TensorInfo
from edgellm.export.checkpoints.weights import StoredTensor, Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.reader import ConfigReader
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.graph.bundle_files import DTYPES, write_graphs
from edgellm.export.graph.decoder import build_commit, build_decoder
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
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


def config_of(name: str, layers: int, *, quick: bool) -> dict[str, Any]:
    """Return a shape with `layers` of 48 layers, and the same share of the vocabulary."""
    config = dict(SHAPES[name])
    if quick and "num_experts" in config:
        config["num_experts"] = 16
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


def make(config: dict[str, Any], folder: Path) -> None:
    """Write the graph and its packed weights."""
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


def measure(config: dict[str, Any], folder: Path, threads: int) -> dict[str, float]:
    """Measure load and forward passes of one model, in its own process."""
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
    graph = load_graph(folder / "decode.onnx", GraphOptions(threads=threads, own_kernels=True))
    session = DecoderNetwork(
        runner=open_runner([LoadedGraph(graph)], spec.kv, CAPACITY), spec=spec, capacity=CAPACITY
    )
    found = {"load_s": time.perf_counter() - start}
    random = np.random.default_rng(0)

    def run(rows: int, begin: int) -> float:
        ids = random.integers(0, spec.vocab_size, rows)
        return elapsed_ms(lambda: session.run(ids, begin, np.arange(rows)), clock_of(threads))

    for begin in range(0, CONTEXT, 64):
        run(64, begin)
    found |= {
        "anonymous_mb": memory_bytes("RssAnon") / 1e6,
        "mapped_mb": memory_bytes("RssFile") / 1e6,
    }
    for rows in ROWS:
        times = [run(rows, CONTEXT) for _ in range(DECODED)]
        found[f"ms_{rows}"] = statistics.median(times)
    return found


def llama_cpp_ms(given: argparse.Namespace) -> float:
    """Return llama.cpp's milliseconds a token of the MoE model, after `CONTEXT` tokens."""
    path = given.work / f"mixture-{given.layers}.gguf"
    if not path.exists():
        partial_file = path.with_suffix(".partial")
        config = config_of("30B-A3B", given.layers, quick=given.quick)
        random_gguf.write_mixture(config, smollm2.fetch(), partial_file)
        partial_file.replace(path)
    process = Process(given.llama_python, "llama.cpp", path, given.threads)
    found = statistics.median(process.measure("decode", DECODED))
    process.close()
    return found


def show_moe(given: argparse.Namespace, report: Report) -> None:
    """Compare both models, which alternate in new processes."""
    if given.measure:
        config = config_of(given.measure, given.layers, quick=given.quick)
        found = measure(config, given.work, given.threads)
        print(*(f"{key}={value}" for key, value in found.items()), sep="\n")
        return
    folders: dict[str, Path] = {}
    for name in SHAPES:
        suffix = "-quick" if given.quick else ""
        folders[name] = given.work / f"{name.replace(' ', '-')}-{given.layers}{suffix}"
        if not folders[name].exists():
            made = folders[name].with_suffix(".partial")
            shutil.rmtree(made, ignore_errors=True)
            make(config_of(name, given.layers, quick=given.quick), made)
            made.replace(folders[name])
    results: dict[str, list[dict[str, float]]] = {name: [] for name in SHAPES}
    theirs = []
    for _ in range(given.rounds):
        for name, folder in folders.items():
            results[name].append(_measured(name, folder, given))
        if given.llama_python:
            theirs.append(llama_cpp_ms(given))
    rows = []
    for name, found in results.items():
        best = {key: min(each[key] for each in found) for key in found[0]}
        ratios = [f"{best[f'ms_{count}'] / best['ms_1']:.2f}" for count in ROWS[1:]]
        sizes = f"{folder_bytes(folders[name]) / 1e9:.2f}", f"{best['load_s']:.2f}"
        memory = f"{best['anonymous_mb']:.0f}", f"{best['mapped_mb']:.0f}"
        rows.append([name, *sizes, *memory, f"{1e3 / best['ms_1']:.1f}", *ratios])
    if theirs:
        rows.append(["llama.cpp, Q4_0 blocks", "", "", "", "", f"{1e3 / min(theirs):.1f}"])
        rows[-1] += [""] * len(ROWS[1:])
    columns = ["model", "on disk, GB", "load s", "anonymous MB", "mapped MB", "tokens/s"]
    report.add("moe", [*columns, *(f"v({count})" for count in ROWS[1:])], rows)
    pairs = zip(*results.values(), strict=True)
    ratios = [mixture["ms_1"] / dense["ms_1"] for mixture, dense in pairs]
    print(f"a token of the mixture takes {statistics.median(ratios):.2f} x the dense model's time")
    counts = [f"{touched(128, 8, count):.0f}" for count in ROWS[1:]]
    report.add("moe-experts", ["tokens", *map(str, ROWS[1:])], [["experts of 128", *counts]])


def _measured(name: str, folder: Path, given: argparse.Namespace) -> dict[str, float]:
    """Measure in a new process."""
    words = [sys.executable, __file__, "moe", "--measure", name, "--layers", given.layers]
    words += ["--work", folder, "--threads", given.threads, *(["--quick"] if given.quick else [])]
    said = subprocess.run([*map(str, words)], check=True, capture_output=True, text=True).stdout
    pairs = (line.split("=") for line in said.splitlines() if "=" in line)
    return {key: float(value) for key, value in pairs}


EXPERTS, TAKEN, HIDDEN, INNER, BLOCK = 128, 8, 2048, 768, 32
CALLS = 15
_FLOAT, _INT = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


def _operator_session(
    node: onnx.NodeProto, inputs: dict[str, int], held: dict[str, np.ndarray], threads: int
) -> ort.InferenceSession:
    graph = helper.make_graph(
        [node],
        "experts",
        [helper.make_tensor_value_info(name, kind, None) for name, kind in inputs.items()],
        [helper.make_tensor_value_info("y", _FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    opsets = [helper.make_opsetid(*each) for each in (("", 21), ("com.microsoft", 1), (DOMAIN, 1))]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    register(options)
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def own_experts(threads: int) -> ort.InferenceSession:
    """Return a session of edgellm's operator."""
    held = {}
    for name, form in (
        (
            "gates",
            PackedForm(
                kind="int4", in_features=HIDDEN, out_features=2 * INNER, block=BLOCK, is_gated=True
            ),
        ),
        ("downs", PackedForm(kind="int4", in_features=INNER, out_features=HIDDEN, block=BLOCK)),
    ):
        count = EXPERTS * (form.num_bytes - 64) // form.record_bytes
        records = np.random.default_rng(0).integers(0, 256, (count, form.record_bytes), np.uint8)
        records[:, -64:] = np.full(32, 2e-3, np.float16).view(np.uint8)
        headers = np.frombuffer(form.header() * EXPERTS, np.uint8)
        held[name] = np.concatenate([records.reshape(-1), headers])
    names = ["x", "ids", "shares", "gates", "downs"]
    node = helper.make_node("Experts", names, ["y"], domain=DOMAIN, experts=EXPERTS)
    return _operator_session(node, {"x": _FLOAT, "ids": _INT, "shares": _FLOAT}, held, threads)


def qmoe(threads: int) -> ort.InferenceSession:
    """Return a session of ONNX Runtime's operator."""
    random = np.random.default_rng(0)
    held = {}
    for index, (rows, width) in enumerate(((2 * INNER, HIDDEN), (HIDDEN, INNER)), 1):
        held[f"w{index}"] = random.integers(0, 256, (EXPERTS, rows, width // 2), np.uint8)
        held[f"s{index}"] = np.full((EXPERTS, rows, width // BLOCK), 2e-3, np.float32)
    node = helper.make_node(
        "QMoE", ["x", "logits", "w1", "s1", "", "w2", "s2"], ["y"], domain="com.microsoft",
        k=TAKEN, activation_type="swiglu", swiglu_fusion=1, normalize_routing_weights=1,
        expert_weight_bits=4, block_size=BLOCK,
    )  # fmt: skip
    return _operator_session(node, {"x": _FLOAT, "logits": _FLOAT}, held, threads)


def show_operator(given: argparse.Namespace, report: Report) -> None:
    """Compare the experts of one layer with QMoE: milliseconds by number of tokens."""
    clock, random = clock_of(given.threads), np.random.default_rng(1)
    sessions = {"edgellm": own_experts(given.threads), "QMoE": qmoe(given.threads)}
    found: dict[str, list[str]] = {name: [name] for name in sessions}
    counts = ROWS[:1] if given.quick else ROWS
    for count in counts:
        x = random.standard_normal((count, HIDDEN), np.float32)
        ids = np.stack([random.permutation(EXPERTS)[:TAKEN] for _ in range(count)])
        shares = np.full((count, TAKEN), 1 / TAKEN, np.float32)
        logits = np.zeros((count, EXPERTS), np.float32)
        np.put_along_axis(logits, ids, 9, 1)
        inputs = {"x": x, "ids": ids, "shares": shares, "logits": logits}
        calls = {}
        for name, session in sessions.items():
            wanted = {each.name: inputs[each.name] for each in session.get_inputs()}
            run = partial(session.run, None, wanted)
            run()
            calls[name] = partial(elapsed_ms, run, clock)
        for name, times in alternating(calls, CALLS).items():
            found[name].append(f"{statistics.median(times):.2f}")
    report.add("moe-operator", ("operator", *map(str, counts)), found.values())


PROMPT, CONVERSATION = 64, 4096
PARENTS = (-1, 0, 0, 0, 1, 1, 2, 3, 4, 4, 5, 8, 8, 11)  # of 14 nodes, six levels
QWEN = {
    "model_type": "qwen3_5_text",
    "vocab_size": 4096,
    "hidden_size": 2560,
    "num_hidden_layers": 4,
    "intermediate_size": 9216,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
_TURNS = {"vocab_size": 49152, "max_position_embeddings": 32768, "eos_token_id": 2}
TURNS: dict[str, dict[str, Any]] = {
    "LFM2-350M, 6 of 16 layers": {
        **_TURNS,
        "model_type": "lfm2",
        "hidden_size": 1024,
        "intermediate_size": 4608,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5],
        "norm_eps": 1e-5,
    },
    "Gemma 3 1B, 6 of 26 layers": {
        **_TURNS,
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
}


def open_shape(folder: Path) -> DecoderNetwork:
    """Open the layers of `QWEN`, with random packed weights."""
    architecture = models.find(QWEN["model_type"])
    facts = architecture.Config.from_hf(ConfigReader(QWEN))
    declared = DeclaredWeights(source=Declared())
    model, op, recurrences = build_decoder(architecture, facts, declared, DTYPES["fp32"])
    assert recurrences is not None
    for value, stored in op.parameters.values():
        value.const_value = ir.LazyTensor(
            lambda stored=stored: ir.tensor(_contents(stored)),
            dtype=stored.dtype,
            shape=ir.Shape(stored.shape),
            name=stored.name,
        )
    # Packing these random weights would take minutes.
    linears.packed_bytes = random_records  # type: ignore[assignment]
    weights = WeightFile(folder / "decode.data")
    kernel = linears.OwnLinears(rounds="int4", one_term=COARSE_INPUTS)
    attending = len(facts.attending_layers)
    pages = PageSpec(64, (0,) * attending)
    kv = KVCacheSpec(
        num_layers=attending,
        num_kv_heads=facts.num_key_value_heads,
        head_dim=facts.head_dim,
        dtype="float32",
        pages=pages,
    )
    write_graphs(folder, {"portable": build_commit(recurrences)}, None)
    commit, _ = compile_commit(folder / "portable.onnx", folder, 1, own_kernels=True)
    recurrent = recurrences.spec
    lower(model, kernel, weights, kv, CAPACITY)
    weights.close()
    ir.save(model, folder / "decode.onnx")
    graph = load_graph(folder / "decode.onnx", GraphOptions(threads=1, own_kernels=True))
    spec = DecoderSpec(
        model_type=QWEN["model_type"],
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        max_positions=CAPACITY,
        num_parameters=0,
        kv=kv,
        recurrent=recurrent,
    )
    runner = open_runner([LoadedGraph(graph)], kv, CAPACITY)
    return DecoderNetwork(runner=runner, spec=spec, capacity=CAPACITY, commit=commit)


def _contents(stored: StoredTensor) -> np.ndarray:
    return contents(stored.name, stored.shape).astype(stored.dtype.numpy())


def show_tree(given: argparse.Namespace, report: Report) -> None:
    """Measure the bytes of a tree's nodes, and those of one state for each node."""
    del given
    nodes = len(PARENTS)
    mask = np.eye(nodes, dtype=np.bool_)
    for node, parent in enumerate(PARENTS[1:], 1):
        mask[node] |= mask[parent]
    with tempfile.TemporaryDirectory() as folder:
        session = open_shape(Path(folder))
        random = np.random.default_rng(0)
        session.run(random.integers(0, 4096, PROMPT), 0, np.array([0]))
        session.run(random.integers(0, 4096, 1), PROMPT, np.array([0]))
        before = memory_bytes("RssAnon")
        positions = PROMPT + 1 + mask.sum(1) - 1
        result = session.run(
            random.integers(0, 4096, nodes),
            PROMPT + 1,
            np.arange(nodes),
            position_ids=positions,
            tree_mask=mask,
        )
        grown = memory_bytes("RssAnon") - before
        outputs = result._outputs  # stored until the next forward pass
        stored = sum(outputs[name].nbytes for name in outputs if name.startswith("state_rows."))
        states = session.state_bytes
    rows = [
        ["states of a sequence", f"{states / 1e6:.2f}"],
        [
            f"kept for a node until acceptance ({stored / nodes / states * 100:.1f} % of a state)",
            f"{stored / nodes / 1e6:.3f}",
        ],
        ["growth of the process with the first such pass", f"{grown / 1e6:.1f}"],
        [f"{nodes} states, for comparison", f"{nodes * states / 1e6:.1f}"],
    ]
    report.add("tree-memory", ("", "MB"), rows)


def show_turns(given: argparse.Namespace, report: Report) -> None:
    """Count the computed tokens of the second turn of a long conversation."""
    if given.quick:
        print("left out: the models of turns take minutes")
        return
    rows = [[name, *map(str, second_turn(name, given.work))] for name in TURNS]
    report.add("second-turn", ("model", "first prompt", "second", "reused", "computed"), rows)


def second_turn(name: str, work: Path) -> tuple[int, int, int, int]:
    """Return the tokens of both prompts, and the reused and computed ones of the second."""
    folder = work / TURNS[name]["model_type"]
    if not (folder / "engine").exists():
        _build(TURNS[name], folder)
    random = np.random.default_rng(1)
    words = [f" {word}" for word in ("river", "stone", "market", "engine", "window", "garden")]
    text = "".join(random.choice(words) for _ in range(CONVERSATION))
    ask = {
        "sampling": SamplingParams(temperature=0),
        "max_generate_length": 8,
        "stop": (),
        "add_special_tokens": False,
    }
    with LLM(folder / "engine", context_reuse=True) as llm:
        first = llm.generate_text(GenerationRequest(text=text, **ask))
        list(first)
        second = llm.generate_text(
            GenerationRequest(text=f"{text}{first.text}{''.join(words)}", **ask)
        )
        list(second)
    (tokens,), (reused,) = second.profile.prompt_tokens, second.profile.reused_tokens
    return first.profile.prompt_tokens[0], tokens, reused, tokens - reused


def _build(config: dict[str, Any], folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    model.save_pretrained(folder / "checkpoint")
    del model
    for name, data in open_checkpoint(str(smollm2.fetch())).tokenizer_files.items():
        (folder / "checkpoint" / name).write_bytes(data)
    export_llm(open_checkpoint(str(folder / "checkpoint")), folder / "bundle", ExportOptions())
    plan = Plan(
        max_input_len=CONVERSATION + 256,
        kv_capacity=CONVERSATION + 512,
        threads=2,
        prefill="same",
        quantize="int8",
        checks=False,
    )
    plan = replace(plan, options=CpuOptions("edgellm"))
    build_engine("llm", folder / "bundle", folder / "engine", plan, "onnxruntime", silent)


MODES = {"moe": show_moe, "operator": show_operator, "tree": show_tree, "turns": show_turns}


def main() -> None:
    parser = command.parser(__doc__, MODES, rounds=3)
    parser.add_argument("--layers", type=int, default=12, help="of 48, of `moe`")
    parser.add_argument("--llama_python", default="", help="a python with llama-cpp-python")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    command.run(parser, MODES, {"layers": 1})


if __name__ == "__main__":
    main()
