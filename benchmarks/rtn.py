"""Make a round-to-nearest INT4 checkpoint from a float one: weights for the speed benchmarks.

Layout: ModelOpt's W4A16 (`edgellm.quantize.formats`). All linear layers and lm_head are rounded,
the embedding stays as it is. Round-to-nearest is not a quality method; `benchmarks/` measures time.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from edgellm.export.checkpoint import read_whole
from edgellm.export.source import open_checkpoint
from edgellm.quantize.formats import pack_int4

_NUMPY = {"F32": np.float32, "F16": np.float16}


def round_checkpoint(source: str, output: Path, block_size: int) -> None:
    """Write `output` as a quantized copy of the checkpoint `source`.

    Raises:
        ValueError: an input width is not a multiple of the block (576 % 128, say): the last
            resort is the largest power of two that divides it, which the caller chooses.
    """
    checkpoint = open_checkpoint(source)
    tensors: dict[str, np.ndarray] = {}
    for name, info in checkpoint.tensors.infos().items():
        raw = read_whole(checkpoint.tensors, name)
        if info.dtype == "BF16":
            wide = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
            array = wide.view(np.float32).reshape(info.shape)
        else:
            array = np.frombuffer(raw, _NUMPY[info.dtype]).reshape(info.shape).astype(np.float32)
        is_embedding = name == "model.embed_tokens.weight"
        if array.ndim == 2 and not is_embedding:
            _round_into(tensors, name, array, block_size)
        else:
            tensors[name] = array.astype(np.float16) if is_embedding else array
    if checkpoint.config.get("tie_word_embeddings"):
        embedding = tensors["model.embed_tokens.weight"].astype(np.float32)
        _round_into(tensors, "lm_head.weight", embedding, block_size)
    output.mkdir(parents=True, exist_ok=True)
    save_file(tensors, output / "model.safetensors")
    quantization = {"quant_algo": "W4A16_AWQ", "group_size": block_size, "has_zero_point": False}
    for name, content in (
        ("config.json", checkpoint.config),
        ("generation_config.json", checkpoint.generation_config),
        ("hf_quant_config.json", {"quantization": quantization}),
    ):
        (output / name).write_text(json.dumps(content))
    for name, data in checkpoint.tokenizer_files.items():
        (output / name).write_bytes(data)


def _round_into(
    tensors: dict[str, np.ndarray], name: str, array: np.ndarray, block_size: int
) -> None:
    width = array.shape[1]
    while width % block_size:
        block_size //= 2
    tensors[name], tensors[f"{name}_scale"] = pack_int4(array, block_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("output", type=Path)
    parser.add_argument("--block_size", type=int, default=32)
    arguments = parser.parse_args()
    if arguments.output.exists():
        shutil.rmtree(arguments.output)
    round_checkpoint(arguments.source, arguments.output, arguments.block_size)


if __name__ == "__main__":
    main()
