"""Cost of export: SmolLM2, an 8B-shaped checkpoint against `cp`, and torch.onnx.export.

    pip install -e '.[dev]'
    python benchmarks/export.py            # needs 50 GB of free disk for the 8B shape
    python benchmarks/export.py --layers 4 # fewer layers

CPU seconds and peak memory are the operating system's figures of the finished process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from harness import checkpoints

from edgellm.scripts import smollm2

SHAPE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "eos_token_id": 2,
}  # fmt: skip
_TORCH_EXPORT = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
model.config.use_cache = False
ids = torch.arange(16)[None]
rows = torch.export.Dim("rows", min=2, max=1024)
torch.onnx.export(model, (ids,), sys.argv[2], dynamo=True, external_data=True,
                  dynamic_shapes={"input_ids": {1: rows}}, opset_version=23, verbose=False)
"""


@dataclass(frozen=True)
class Cost:
    wall_s: float
    cpu_s: float
    peak_bytes: int


def run(*command: object) -> Cost:
    """Return the cost of a whole process."""
    start = time.perf_counter()
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{command} failed")
    cpu = usage.ru_utime + usage.ru_stime
    return Cost(time.perf_counter() - start, cpu, usage.ru_maxrss * 1024)


def median(costs: list[Cost]) -> Cost:
    return Cost(*(statistics.median(getattr(c, f) for c in costs) for f in Cost.__annotations__))


def export(model: Path, output: Path) -> Cost:
    shutil.rmtree(output, ignore_errors=True)
    script = Path(sys.executable).parent / "edgellm-export"
    return run(script, "llm", "--model_dir", model, "--output_dir", output)


def make_large(folder: Path, layers: int, tokenizer_from: Path) -> Path:
    """Write a sharded bfloat16 checkpoint of Llama-3-8B's shape with random weights."""
    if folder.exists():
        return folder
    partial = folder.with_name("large.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    hidden, inner, kv = SHAPE["hidden_size"], SHAPE["intermediate_size"], 1024
    parts = {"model.norm.weight": [hidden]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        parts[name] = [SHAPE["vocab_size"], hidden]
    shards = [parts]
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes = {"input_layernorm": [hidden], "post_attention_layernorm": [hidden],
                  "self_attn.q_proj": [hidden, hidden], "self_attn.k_proj": [kv, hidden],
                  "self_attn.v_proj": [kv, hidden], "self_attn.o_proj": [hidden, hidden],
                  "mlp.gate_proj": [inner, hidden], "mlp.up_proj": [inner, hidden],
                  "mlp.down_proj": [hidden, inner]}  # fmt: skip
        shards.append({f"{prefix}{name}.weight": shape for name, shape in shapes.items()})
    values = np.random.default_rng(0).standard_normal(1 << 23, np.float32) / hidden**0.5
    noise = values.astype(ml_dtypes.bfloat16).tobytes()
    weight_map = {}
    for index, shard in enumerate(shards):
        name = f"model-{index:05}.safetensors"
        _write_shard(partial / name, shard, noise)
        weight_map |= dict.fromkeys(shard, name)
    index = {"weight_map": weight_map}
    (partial / "model.safetensors.index.json").write_text(json.dumps(index))
    (partial / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": layers}))
    for path in tokenizer_from.glob("*tokenizer*.json"):
        shutil.copy(path, partial)
    partial.rename(folder)
    return folder


def _write_shard(path: Path, shapes: dict[str, list[int]], noise: bytes) -> None:
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        while offset:
            offset -= stream.write(noise[: min(offset, len(noise))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=smollm2.cache_folder() / "benchmarks")
    parser.add_argument("--layers", type=int, default=32, help="layers of the 8B shape; 0: skip it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no_torch", action="store_true")
    arguments = parser.parse_args()
    small, out = arguments.work / "bf16", arguments.work / "exported"
    if not small.exists():
        checkpoints.float_checkpoint(str(smollm2.fetch()), small, dtype="BF16")
    bare = median([run(sys.executable, "-c", "pass") for _ in range(arguments.rounds)])
    ours = median([export(small, out) for _ in range(arguments.rounds)])
    memory = (ours.peak_bytes - bare.peak_bytes) / 1e6
    print(
        f"SmolLM2 bf16: {ours.cpu_s:.2f} s CPU, {ours.wall_s:.2f} s, "
        f"{memory:.0f} MB beyond the interpreter"
    )
    if not arguments.no_torch:
        target = arguments.work / "torch" / "model.onnx"
        target.parent.mkdir(exist_ok=True)
        traced = run(sys.executable, "-c", _TORCH_EXPORT, small, target)
        shutil.rmtree(target.parent)
        print(
            f"torch.onnx.export(dynamo=True): {traced.cpu_s:.1f} s CPU, {traced.wall_s:.1f} s, "
            f"{traced.peak_bytes / 1e6:.0f} MB: {traced.cpu_s / ours.cpu_s:.0f} x the CPU time, "
            f"{traced.wall_s / ours.wall_s:.0f} x the time"
        )
    if arguments.layers:
        _large(arguments.work, arguments.layers, arguments.rounds, small)


def _large(work: Path, layers: int, rounds: int, tokenizer_from: Path) -> None:
    large = make_large(work / f"large-{layers}", layers, tokenizer_from)
    size = sum(path.stat().st_size for path in large.iterdir())
    copies, exports = [], []
    for _ in range(rounds):
        shutil.rmtree(work / "copied", ignore_errors=True)
        copies.append(run("cp", "-r", large, work / "copied"))
        shutil.rmtree(work / "copied")
        exports.append(export(large, work / "exported"))
        shutil.rmtree(work / "exported")
    ratio = statistics.median(e.wall_s / c.wall_s for e, c in zip(exports, copies, strict=True))
    copied, exported = median(copies), median(exports)
    print(
        f"8B shape, {layers} layers, {size / 1e9:.1f} GB: export {exported.wall_s:.1f} s, "
        f"{exported.cpu_s:.1f} s CPU, peak {exported.peak_bytes / 1e6:.0f} MB; "
        f"cp {copied.wall_s:.1f} s; export / cp {ratio:.2f} x"
    )


if __name__ == "__main__":
    main()
