"""Anonymous memory, time and bytes of building engines of quantized weights.

    python benchmarks/build_memory.py [--shapes 1b 8b] [--kinds Q4_0 Q4_K AWQ] [--work FOLDER]
    python benchmarks/build_memory.py --quick

Random weights of Llama 3's shapes are written tensor by tensor, exported, and built by `llm_build`
in its own process, whose anonymous memory (RssAnon) is sampled. The bound is 600 MB plus twice the
largest weight, as stored or in float16, whichever is larger.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_OF_ALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        **_OF_ALL,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 4,
        "vocab_size": 32000,
        "tie_word_embeddings": True,
    },
    "1b": {
        **_OF_ALL,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "8b": {
        **_OF_ALL,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}
_BLOCKS = {"Q4_0": (32, 18), "Q4_K": (256, 144)}  # values and bytes of a GGUF block
_GROUP = 128  # of AWQ
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_BOUND, _COPIES = 600e6, 2
_SAMPLE_S = 0.01


# ------------------------------------------------------------------------------- checkpoints
def write_checkpoint(shape: str, kind: str, folder: Path) -> Path:
    """Write random weights: a GGUF file, or a folder in AWQ's layout.

    Returns:
        The value of `edgellm-export llm --model_dir`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "AWQ":
        _write_awq(SHAPES[shape], folder)
        return folder
    write_gguf(SHAPES[shape], kind, folder / "model.gguf")
    return folder / "model.gguf"


def matrices(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return [out, in] of all linear layers by name."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    square, narrow, wide = (hidden, hidden), (keys, hidden), (inner, hidden)
    all_sizes = (square, narrow, narrow, square, wide, wide, (hidden, inner))
    sizes = dict(zip(_LAYER, all_sizes, strict=True))
    layers = range(config["num_hidden_layers"])
    return {f"model.layers.{at}.{name}": size for at in layers for name, size in sizes.items()}


def write_gguf(config: dict[str, Any], kind: str, path: Path) -> None:
    """Write a GGUF file of a config of `SHAPES`, all matrices in one format."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    _add_tokens(writer, config["vocab_size"])
    shapes = dict(_gguf_shapes(config))
    values, size = _BLOCKS[kind]
    stored = {
        name: (*shape[:-1], shape[-1] // values * size) if len(shape) > 1 else shape
        for name, shape in shapes.items()
    }
    for name, shape in stored.items():
        is_matrix = len(shape) > 1
        dtype = np.dtype(np.uint8 if is_matrix else np.float32)
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        of_blocks = gguf.GGMLQuantizationType[kind] if is_matrix else None
        writer.add_tensor_info(name, shape, dtype, num_bytes, of_blocks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    some = _blocks(kind)
    for shape in stored.values():
        is_matrix = len(shape) > 1
        array = np.resize(some, int(np.prod(shape))).reshape(shape)
        writer.write_tensor_data(array if is_matrix else np.ones(shape, np.float32))
    writer.close()


def _gguf_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "token_embd.weight", (vocab, hidden)
    yield "output_norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "output.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        yield f"blk.{layer}.attn_norm.weight", (hidden,)
        yield f"blk.{layer}.ffn_norm.weight", (hidden,)
    for name, shape in matrices(config).items():
        _, _, layer, module = name.split(".", 3)
        yield f"blk.{layer}.{_LAYER[module]}.weight", shape


def _blocks(kind: str) -> np.ndarray:
    """Return random blocks with values of about 0.02."""
    _, size = _BLOCKS[kind]
    some = np.random.default_rng(0).integers(0, 256, (16384, size), np.uint8)
    scale = 0.005 if kind == "Q4_0" else 1e-4
    some[:, :2] = np.full(1, scale, np.float16).view(np.uint8)
    if kind == "Q4_K":
        some[:, 2:4] = np.full(1, 7.5 * scale, np.float16).view(np.uint8)
    return some.reshape(-1)


def _add_tokens(writer: gguf.GGUFWriter, count: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    words = ["<unk>", "<s>", "</s>", *(f"w{at}" for at in range(3, count - 2)), "w", "9"]
    writer.add_token_list(words)
    writer.add_token_types([3 if at in (1, 2) else 1 for at in range(count)])
    writer.add_token_merges(["w 9"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _write_awq(config: dict[str, Any], folder: Path) -> None:
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, (out, width) in matrices(config).items():
        tensors[f"{name}.qweight"] = "I32", (width, out // 8)
        tensors[f"{name}.qzeros"] = "I32", (width // _GROUP, out // 8)
        tensors[f"{name}.scales"] = "F16", (width // _GROUP, out)
    floats = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            floats[f"model.layers.{layer}.{norm}.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        floats["lm_head.weight"] = (vocab, hidden)
    tensors |= {name: ("F16", shape) for name, shape in floats.items()}
    _write_safetensors(tensors, folder / "model.safetensors")
    quantization = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": _GROUP,
        "version": "gemm",
        "zero_point": True,
    }
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    _write_words(folder / "tokenizer.json", vocab)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')


def _write_words(path: Path, count: int) -> None:
    words = ["<unk>", "<s>", "</s>", *(f"w{at}" for at in range(3, count))]
    model = {
        "type": "WordLevel",
        "vocab": {word: at for at, word in enumerate(words)},
        "unk_token": "<unk>",
    }
    before = {"type": "WhitespaceSplit"}
    path.write_text(json.dumps({"version": "1.0", "pre_tokenizer": before, "model": model}))


def _write_safetensors(tensors: dict[str, tuple[str, tuple[int, ...]]], path: Path) -> None:
    sizes = {
        name: int(np.prod(shape)) * (4 if kind == "I32" else 2)
        for name, (kind, shape) in tensors.items()
    }
    header: dict[str, Any] = {}
    offset = 0
    for name, (kind, shape) in tensors.items():
        end = offset + sizes[name]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    random = np.random.default_rng(0)
    integers = random.integers(-(1 << 31), 1 << 31, 1 << 20, np.int64).astype(np.int32)
    floats = random.normal(0, 0.02, 1 << 20).astype(np.float16)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, (kind, shape) in tensors.items():
            count = int(np.prod(shape))
            some = integers if kind == "I32" else floats
            if name.endswith(".scales"):
                some = np.full(1, 0.004, np.float16)
            elif name.endswith("norm.weight"):
                some = np.ones(1, np.float16)
            np.resize(some, count).tofile(stream)


# ------------------------------------------------------------------------------------ builds
@dataclass(frozen=True)
class Peak:
    """Peak memory and time of one process."""

    anonymous_bytes: int
    seconds: float


def watched(line: Sequence[object]) -> Peak:
    """Run a command, and sample its anonymous memory.

    Raises:
        SystemExit: the command fails.
    """
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen([*map(str, line)], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, _anonymous_bytes(process.pid))
        time.sleep(_SAMPLE_S)
    if process.returncode:
        sys.exit(f"{line} failed")
    return Peak(peak, time.perf_counter() - start)


def _anonymous_bytes(pid: int) -> int:
    """Return RssAnon; 0 after the process ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    found = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(next(found, "0")) << 10


def command(module: str, *flags: object) -> list[object]:
    """Return the command line of a module's program."""
    return [sys.executable, "-c", f"from {module} import main; main()", *flags]


def largest_weight(bundle: Path) -> int:
    """Return the bytes of the largest weight, as stored or in float16."""
    import onnx

    graph = onnx.load(bundle / "model.onnx", load_external_data=False).graph
    sizes = [2 * int(np.prod(each.dims)) for each in graph.initializer]
    stored = [
        int(entry.value)
        for each in graph.initializer
        for entry in each.external_data
        if entry.key == "length"
    ]
    return max(*sizes, *stored)


def measure(shape: str, kind: str, work: Path) -> bool:
    """Print a row of the table; return whether the build stays below the bound."""
    checkpoint, bundle, engine = (work / name for name in ("checkpoint", "bundle", "engine"))
    source = write_checkpoint(shape, kind, checkpoint)
    exporting = command("edgellm.export.cli", "llm", "--model_dir", source)
    exported = watched([*exporting, "--output_dir", bundle])
    shutil.rmtree(checkpoint)
    lengths = "--maxInputLen", 1024, "--maxKVCacheCapacity", 2048
    flags = "--onnxDir", bundle, "--engineDir", engine, *lengths
    peak = watched(command("edgellm.build.cli", *flags))
    stored, built = _size(bundle), _size(engine)
    bound = _BOUND + _COPIES * largest_weight(bundle)
    print(
        f"| {shape} {kind} | {stored / 1e6:.0f} | {built / 1e6:.0f} "
        f"| {exported.anonymous_bytes / 1e6:.0f} | {peak.anonymous_bytes / 1e6:.0f} "
        f"| {bound / 1e6:.0f} | {peak.seconds:.1f} |",
        flush=True,
    )
    return peak.anonymous_bytes <= bound


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1b", "8b"])
    parser.add_argument("--kinds", nargs="+", choices=[*_BLOCKS, "AWQ"], default=[*_BLOCKS, "AWQ"])
    parser.add_argument("--quick", action="store_true", help="only the shape tiny")
    parser.add_argument("--work", type=Path, help="folder of temporary files")
    options = parser.parse_args()
    columns = (
        "weights",
        "bundle MB",
        "engine MB",
        "export, anonymous MB",
        "build, anonymous MB",
        "bound MB",
        "build s",
    )
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
    kept = []
    for shape in ["tiny"] if options.quick else options.shapes:
        for kind in options.kinds:
            with tempfile.TemporaryDirectory(dir=options.work) as work:
                kept.append(measure(shape, kind, Path(work)))
    if not all(kept):
        sys.exit("a build took more than the bound")


if __name__ == "__main__":
    main()
