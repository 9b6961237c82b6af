"""Recurrent layers and sliding windows: memory of a tree, and computed tokens of a second turn.

    python benchmarks/hybrids.py --tree
    python benchmarks/hybrids.py --turns --work /somewhere/with/2GB

`--tree`: a forward pass over 14 nodes in some layers of Qwen3.5-4B's shape, with random INT4
weights. It compares the bytes stored for each node until acceptance with those of a sequence's
states, and measures the growth of the process. `--turns`: a conversation of 4096 tokens with some
layers of the shapes of LFM2-350M and Gemma 3 1B, with random 8-bit weights; the profile of the
second turn counts its computed tokens.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import moe_and_hybrids
import numpy as np
import onnx_ir as ir

from edgellm.build.engine import build_engine
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.onnxruntime_cpu.commit_graph import compile_commit
from edgellm.build.onnxruntime_cpu.edgellm_kernels import linears
from edgellm.build.onnxruntime_cpu.linears import COARSE_INPUTS
from edgellm.build.onnxruntime_cpu.lower import lower
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.core.model_spec import DecoderSpec, KVCacheSpec, PageSpec
from edgellm.device_runtime import LLM, SamplingParams
from edgellm.device_runtime.networks.decoder import DecoderNetwork
from edgellm.device_runtime.runners.onnxruntime_cpu.runner import LoadedGraph, open_runner
from edgellm.device_runtime.runners.onnxruntime_graphs import load_graph
from edgellm.export import models
from edgellm.export.checkpoints.weights import StoredTensor
from edgellm.export.config.reader import ConfigReader
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.graph.bundle_files import DTYPES, write_graphs
from edgellm.export.graph.decoder import build_commit, build_decoder
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.resolve import open_checkpoint
from edgellm.scripts import smollm2

CAPACITY, PROMPT, CONVERSATION = 1024, 64, 4096
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
SHAPES: dict[str, dict[str, Any]] = {
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
    declared = moe_and_hybrids.DeclaredWeights(moe_and_hybrids.Declared())
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
    linears.packed_bytes = moe_and_hybrids.random_records  # type: ignore[assignment]
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
    graph = load_graph(folder / "decode.onnx", threads=1, own_kernels=True)
    spec = DecoderSpec(
        model_type=QWEN["model_type"],
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        max_positions=CAPACITY,
        num_parameters=0,
        kv=kv,
        recurrent=recurrent,
    )
    return DecoderNetwork(
        runner=open_runner([LoadedGraph(graph)], kv, CAPACITY),
        spec=spec,
        capacity=CAPACITY,
        commit=commit,
    )


def _contents(stored: StoredTensor) -> np.ndarray:
    return moe_and_hybrids.contents(stored.name, stored.shape).astype(stored.dtype.numpy())


def tree_memory() -> str:
    """Describe the bytes of a node, and those of one state for each node."""
    nodes = len(PARENTS)
    mask = np.eye(nodes, dtype=np.bool_)
    for node, parent in enumerate(PARENTS[1:], 1):
        mask[node] |= mask[parent]
    with tempfile.TemporaryDirectory() as folder:
        session = open_shape(Path(folder))
        random = np.random.default_rng(0)
        session.run(random.integers(0, 4096, PROMPT), 0, np.array([0]))
        session.run(random.integers(0, 4096, 1), PROMPT, np.array([0]))
        before = moe_and_hybrids.memory_kb("RssAnon")
        positions = PROMPT + 1 + mask.sum(1) - 1
        result = session.run(
            random.integers(0, 4096, nodes),
            PROMPT + 1,
            np.arange(nodes),
            position_ids=positions,
            tree_mask=mask,
        )
        grown = (moe_and_hybrids.memory_kb("RssAnon") - before) * 1024
        outputs = result._outputs  # stored until the next forward pass
        rows = sum(outputs[name].nbytes for name in outputs if name.startswith("state_rows."))
        states = session.state_bytes
    layers = QWEN["num_hidden_layers"]
    return (
        f"Qwen3.5-4B shape, {layers} layers, a tree of {nodes} nodes: {rows / nodes / 1e6:.3f} MB "
        f"a node, states {states / 1e6:.3f} MB: {rows / nodes / states:.1%} of one state per node; "
        f"the process grew by {grown / 1e6:.1f} MB, {nodes} states are "
        f"{nodes * states / 1e6:.1f} MB"
    )


def second_turn(name: str, work: Path) -> str:
    """Describe the computed tokens of the second turn of a long conversation."""
    folder = work / SHAPES[name]["model_type"]
    if not (folder / "engine").exists():
        _build(SHAPES[name], folder)
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
        first = llm.generate_text(text, **ask)
        list(first)
        second = llm.generate_text(f"{text}{first.text}{''.join(words)}", **ask)
        list(second)
    (tokens,), (reused,) = second.profile.prompt_tokens, second.profile.reused_tokens
    return (
        f"{name}: first prompt of {first.profile.prompt_tokens[0]} tokens; second turn: {tokens} "
        f"tokens, {reused} cached and {tokens - reused} computed"
    )


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
    build_engine("llm", folder / "bundle", folder / "engine", plan, "onnxruntime", lambda _: None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", action="store_true", help="measure the memory of a tree")
    parser.add_argument(
        "--turns", action="store_true", help="count computed tokens of a second turn"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("hybrids-work"),
        help="folder of engines, which are reused",
    )
    given = parser.parse_args()
    if given.tree:
        print(tree_memory())
    for name in SHAPES if given.turns else ():
        print(second_turn(name, given.work), flush=True)


if __name__ == "__main__":
    main()
