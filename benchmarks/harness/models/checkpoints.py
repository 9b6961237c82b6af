"""SmolLM2's weights in the formats of all engines under test.

Round-to-nearest INT4 in ModelOpt's W4A16 layout for edgellm, GGUF Q4_0 and Q8_0 for llama.cpp, an
INT4 model for onnxruntime-genai. Round to nearest suffices, since these measure time.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from edgellm.export.checkpoints.checkpoint import Checkpoint, read_whole
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.quantize.formats.modelopt import pack_int4
from edgellm.scripts import smollm2
from harness.processes import llama_cpp_quantize

_QUANTIZES = Path(llama_cpp_quantize.__file__)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FLOATS = {"fp32": "F32", "bf16": "BF16"}
_CACHE_SCALE = 0.1
_ROUTER = "mlp.gate.weight"  # of a mixture-of-experts model; stays float


def smollm2_folder(work: Path, name: str) -> Path:
    """Return SmolLM2's checkpoint in `work`; write it if missing.

    Args:
        work: the folder.
        name: fp32, bf16, or int4 and int4_b128, whose blocks have 32 and 128 weights.
    """
    folder = work / {"int4": "int4_b32"}.get(name, name)
    if not folder.exists():
        source = str(smollm2.fetch())
        partial = folder.with_name(f"{folder.name}.partial")
        if name in _FLOATS:
            float_checkpoint(source, partial, _FLOATS[name])
        else:
            round_checkpoint(source, partial, 128 if name == "int4_b128" else 32)
        partial.rename(folder)
    return folder


def float_checkpoint(source: str, output: Path, dtype: str = "F32") -> None:
    """Write a Hugging Face folder of F32 or BF16 weights, for example from a GGUF file."""
    checkpoint = open_checkpoint(source)
    arrays = _arrays(checkpoint)
    if dtype == "BF16":
        arrays = {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()}
    _write(checkpoint, arrays, output, quantization=None)


def round_checkpoint(source: str, output: Path, block_size: int) -> None:
    """Write a quantized copy: INT4 linear layers and lm_head, float16 embedding.

    If the block does not divide a width (576 % 128), the largest power of two that does is used.
    """
    checkpoint = open_checkpoint(source)
    tensors: dict[str, np.ndarray] = {}
    for name, array in _arrays(checkpoint).items():
        if name == _EMBEDDING:
            tensors[name] = array.astype(np.float16)
            if checkpoint.config.get("tie_word_embeddings"):
                _round_into(tensors, _HEAD, array, block_size)
        elif array.ndim == 2 and not name.endswith(_ROUTER):
            _round_into(tensors, name, array, block_size)
        else:
            tensors[name] = array
    quantization = {"quant_algo": "W4A16_AWQ", "group_size": block_size, "has_zero_point": False}
    _write(checkpoint, tensors, output, quantization)


def with_cache_scales(folder: Path) -> Path:
    """Return a copy of a checkpoint with scales of an int8 KV cache, which measure time only."""
    copy = folder.with_name(f"{folder.name}-int8-cache")
    if not copy.exists():
        partial = copy.with_name(f"{copy.name}.partial")
        shutil.copytree(folder, partial, dirs_exist_ok=True)
        path, described = partial / "model.safetensors", partial / "hf_quant_config.json"
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith("self_attn.k_proj.weight")]:
            for part in ("k", "v"):
                scale = name.replace("k_proj.weight", f"{part}_proj.{part}_scale")
                tensors[scale] = np.array(_CACHE_SCALE, np.float32)
        save_file(tensors, path, metadata={"format": "pt"})
        contents: dict[str, dict[str, object]] = {"quantization": {"quant_algo": None}}
        if described.exists():
            contents = json.loads(described.read_text())
        contents["quantization"]["kv_cache_quant_algo"] = "INT8"
        described.write_text(json.dumps(contents))
        partial.rename(copy)
    return copy


def gguf(source: Path, work: Path, kind: str, python: str, *, mixed: bool = False) -> Path:
    """Quantize with llama.cpp, in a python with its package.

    `mixed`: some tensors in other formats, as llama.cpp chooses; else all in one.
    """
    path = work / f"{kind}{'-mixed' if mixed else ''}.gguf"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        arguments = [str(source), str(path), kind, "mixed" if mixed else "alike"]
        subprocess.run([python, _QUANTIZES, *arguments], check=True, stderr=subprocess.DEVNULL)
    return path


def genai(hf_folder: Path, output: Path, python: str) -> Path:
    """Run onnxruntime-genai's builder: INT4, block 32, accuracy level 4, as documented."""
    if not output.exists():
        builder = [python, "-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu"]
        paths = ["-i", str(hf_folder), "-o", str(output), "-c", str(output.parent / "genai-cache")]
        options = ["--extra_options", "int4_block_size=32", "int4_accuracy_level=4"]
        no = subprocess.DEVNULL
        subprocess.run([*builder, *paths, *options], check=True, stdout=no, stderr=no)
    return output


def _arrays(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Convert all tensors to float32."""
    arrays = {}
    for name, info in checkpoint.tensors.infos().items():
        raw = read_whole(checkpoint.tensors, name)
        if info.dtype == "BF16":
            array = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            array = np.frombuffer(raw, {"F32": np.float32, "F16": np.float16}[info.dtype])
        arrays[name] = array.astype(np.float32).reshape(info.shape)
    return arrays


def _round_into(
    tensors: dict[str, np.ndarray], name: str, array: np.ndarray, block_size: int
) -> None:
    while array.shape[1] % block_size:
        block_size //= 2
    tensors[name], tensors[f"{name}_scale"] = pack_int4(array, block_size)


def _write(
    checkpoint: Checkpoint,
    tensors: dict[str, np.ndarray],
    output: Path,
    quantization: dict[str, object] | None,
) -> None:
    output.mkdir(parents=True, exist_ok=True)
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    config = {**checkpoint.config, "architectures": ["LlamaForCausalLM"]}
    contents = {"config.json": config, "generation_config.json": checkpoint.generation_config}
    if quantization is not None:
        contents["hf_quant_config.json"] = {"quantization": quantization}
    for name, content in contents.items():
        (output / name).write_text(json.dumps(content))
    for name, data in checkpoint.tokenizer_files.items():
        (output / name).write_bytes(data)
