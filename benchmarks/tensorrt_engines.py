"""Time, peak memory and size of TensorRT builds, without a GPU.

    python benchmarks/tensorrt_engines.py [--layers 24] [--gpu 12.0]

A model of Qwen2.5-0.5B's shape with random weights is exported in float16 and compiled by
TensorRT-RTX in its own process. Memory is measured twice: anonymous memory, and resident memory,
which includes pages of mapped files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
    "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
    "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "tie_word_embeddings": True, "vocab_size": 151936, "eos_token_id": 151645,
}  # fmt: skip


def write_checkpoint(folder: Path, layers: int, config: Mapping[str, Any] = CONFIG) -> None:
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    random = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        bits = random.integers(0, 1 << 16, shape, np.uint16)  # of either sign, 2 ** -6 to 2 ** -5
        return (bits & 0x807F | 0x3C80).view(ml_dtypes.bfloat16)

    hidden, inner, keys = config["hidden_size"], config["intermediate_size"], 128
    tensors = {"model.embed_tokens.weight": weight(config["vocab_size"], hidden)}
    tensors["model.norm.weight"] = weight(hidden)
    for layer in range(layers):
        name = f"model.layers.{layer}"
        for part, rows in (("q", hidden), ("k", keys), ("v", keys)):
            tensors[f"{name}.self_attn.{part}_proj.weight"] = weight(rows, hidden)
            tensors[f"{name}.self_attn.{part}_proj.bias"] = weight(rows)
        tensors[f"{name}.self_attn.o_proj.weight"] = weight(hidden, hidden)
        tensors[f"{name}.mlp.gate_proj.weight"] = weight(inner, hidden)
        tensors[f"{name}.mlp.up_proj.weight"] = weight(inner, hidden)
        tensors[f"{name}.mlp.down_proj.weight"] = weight(hidden, inner)
        tensors[f"{name}.input_layernorm.weight"] = weight(hidden)
        tensors[f"{name}.post_attention_layernorm.weight"] = weight(hidden)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))


@dataclass(frozen=True)
class Peak:
    """Figures of one build."""

    weights_bytes: int  # of the bundle
    engine_bytes: int
    anonymous_bytes: int  # without pages of files
    resident_bytes: int
    seconds: float


def build_and_watch(bundle: Path, engine: Path, gpu: str) -> Peak:
    """Build an engine in its own process, and sample its memory."""
    flags = ["--onnxDir", bundle, "--engineDir", engine, "--backend", "tensorrt", "--gpu", gpu]
    code = "from edgellm.build.cli import main; main()"
    start, peak = time.perf_counter(), {"RssAnon": 0, "VmHWM": 0}
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, flags)])
    while process.poll() is None:
        for name, size in _memory(process.pid).items():
            if name in peak:
                peak[name] = max(peak[name], size)
        time.sleep(0.02)
    if process.returncode:
        sys.exit("the build failed")
    return Peak(
        sum(path.stat().st_size for path in bundle.iterdir()),
        (engine / "llm.engine").stat().st_size,
        peak["RssAnon"],
        peak["VmHWM"],
        time.perf_counter() - start,
    )


def _memory(pid: int) -> dict[str, int]:
    """Return bytes by kind; empty after the process ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    words = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(kilobytes) * 1024 for name, kilobytes, _ in words}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--gpu", default="12.0")
    options = parser.parse_args()
    from edgellm.export.graph.architecture import ExportOptions
    from edgellm.export.pipeline.llm import export_llm
    from edgellm.export.pipeline.resolve import open_checkpoint

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder / "checkpoint", options.layers)
        source = open_checkpoint(str(folder / "checkpoint"), tokenizer=False)
        export_llm(source, folder / "bundle", ExportOptions("fp16"))
        peak = build_and_watch(folder / "bundle", folder / "engine", options.gpu)
    print(
        f"bundle {peak.weights_bytes / 1e6:.0f} MB, engine {peak.engine_bytes / 1e6:.0f} MB "
        f"in {peak.seconds:.1f} s"
    )
    for kind, size in (("anonymous", peak.anonymous_bytes), ("resident", peak.resident_bytes)):
        times = size / peak.weights_bytes
        print(f"peak {kind} memory {size / 1e6:.0f} MB = {times:.2f} x the weights")


if __name__ == "__main__":
    main()
