"""What building a TensorRT engine takes: time, peak memory and size; needs no GPU.

    python benchmarks/tensorrt_engines.py [--layers 24] [--gpu 12.0]

A model of Qwen2.5-0.5B's shape with random weights is exported in float16 and compiled by
TensorRT-RTX in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
    "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
    "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "tie_word_embeddings": True, "vocab_size": 151936, "eos_token_id": 151645,
}  # fmt: skip


def write_checkpoint(folder: Path, layers: int) -> None:
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    random = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        values = random.standard_normal(shape, np.float32) * 0.02
        return values.astype(ml_dtypes.bfloat16)

    hidden, inner, keys = CONFIG["hidden_size"], CONFIG["intermediate_size"], 128
    tensors = {"model.embed_tokens.weight": weight(CONFIG["vocab_size"], hidden)}
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
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is no copy of a file."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--gpu", default="12.0")
    options = parser.parse_args()
    from edgellm.export.bundle import ExportOptions, export_llm
    from edgellm.export.source import open_checkpoint

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder / "checkpoint", options.layers)
        source = open_checkpoint(str(folder / "checkpoint"), tokenizer=False)
        export_llm(source, folder / "bundle", ExportOptions("fp16"))
        weights = sum(path.stat().st_size for path in (folder / "bundle").iterdir())
        flags = ["--onnxDir", folder / "bundle", "--engineDir", folder / "engine"]
        flags += ["--backend", "tensorrt", "--gpu", options.gpu]
        code = "from edgellm.build.cli import main; main()"
        start = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-c", code, *map(str, flags)])
        anonymous = 0  # file pages in memory can be dropped, these cannot
        while process.poll() is None:
            anonymous = max(anonymous, anonymous_bytes(process.pid))
            time.sleep(0.1)
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        if process.returncode:
            sys.exit("the build failed")
        engine = (folder / "engine" / "llm.engine").stat().st_size
    print(
        f"bundle {weights / 1e6:.0f} MB, engine {engine / 1e6:.0f} MB in {seconds:.1f} s, "
        f"peak memory {peak / 1e6:.0f} MB = {peak / weights:.2f} x the weights, of it "
        f"{anonymous / 1e6:.0f} MB = {anonymous / weights:.2f} x are no pages of files"
    )


if __name__ == "__main__":
    main()
