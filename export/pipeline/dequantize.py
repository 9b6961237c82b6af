"""Dequantizes a checkpoint to float files, for `--verify`.

`reference_weights` dequantizes, independently of the exporter's reader. Inputs that a layer rounds
are rounded by hooks on transformers' modules of that name.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from edgellm.export.checkpoints.checkpoint import Checkpoint, TensorInfo
from edgellm.export.checkpoints.weights import Weights, as_bytes
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.dequantize_experts import BLOCKS, Dense, fp4_stack, joined
from edgellm.export.pipeline.llm import quantized_layers
from edgellm.export.pipeline.reference_weights import (
    E2M1,
    Input,
    quantized_names,
    read_input,
    read_weight,
)

_FP4_BLOCK = 16
_COMPANIONS = ("bias",)  # float tensors of a quantized layer


def write_floats(checkpoint: Checkpoint, options: ExportOptions, folder: Path) -> dict[str, Input]:
    """Write config.json and weights of the same model in floats.

    Returns:
        Input smoothing and rounding of layers, by name.
    """
    tower, shapes = quantized_layers(checkpoint, options)
    tensors, infos = tower.tensors, tower.tensors.infos()
    for name in quantized_names(tensors) - shapes.keys():  # embeddings, layers that were left out
        info = infos.get(f"{name}.weight")
        if info is not None and len(info.shape) == 2:
            shapes[name] = (info.shape[0], info.shape[1])
    dense = {
        f"{name}.weight": Dense(
            shape, partial(read_weight, tensors, tower.quant_config, name, shape)
        )
        for name, shape in shapes.items()
    }
    read = {name: read_input(tensors, name) for name in shapes}
    inputs = {name: each for name, each in read.items() if each.changes}
    own = {
        name: info
        for name, info in infos.items()
        if name.rpartition(".")[0] not in shapes or name.endswith(_COMPANIONS)
    }
    for name in [name for name in own if name.endswith(BLOCKS)]:
        found = fp4_stack(Weights(source=tensors), name, own.pop(name).shape)
        own.pop(found.scales)
        dense[found.name] = found.dense
    _write(tower, own, joined(dense), folder / "model.safetensors")
    config = {key: value for key, value in tower.config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return inputs


def round_inputs(model: Any, inputs: Mapping[str, Input]) -> None:
    """Add hooks to transformers' modules that smooth and round inputs as these layers do."""
    modules = dict(model.named_modules())
    for name, facts in inputs.items():
        if name in modules:  # experts take floats
            modules[name].register_forward_pre_hook(_hook(facts))


def _hook(facts: Input) -> Callable[[Any, tuple[Any, ...]], tuple[Any]]:
    import torch

    def before(_: Any, args: tuple[Any, ...]) -> tuple[Any]:
        x = args[0] if facts.smooth is None else args[0] * torch.from_numpy(facts.smooth)
        if facts.rounds == "int8":
            return (torch.clamp(torch.round(x / facts.scale), -128, 127) * facts.scale,)
        if facts.rounds == "fp8":
            codes = torch.clamp(x / facts.scale, -448, 448).to(torch.float8_e4m3fn)
            return (codes.to(x.dtype) * facts.scale,)
        return (_through_fp4(x, facts.scale) if facts.rounds else x,)

    return before


def _through_fp4(x: Any, scale: float) -> Any:
    """Round a torch tensor to NVFP4: the nearest of sixteen values, times a block's scale."""
    import torch

    table = torch.tensor(E2M1)
    blocks = x.unflatten(-1, (-1, _FP4_BLOCK)).float()
    wanted = (blocks.abs().amax(-1, keepdim=True) / table[-1] / scale).clamp(2.0**-9, 448)
    steps = wanted.to(torch.float8_e4m3fn).float() * scale
    above = torch.bucketize(blocks.abs() / steps, (table[1:] + table[:-1]) / 2, right=True)
    below = torch.bucketize(blocks.abs() / steps, (table[1:] + table[:-1]) / 2)
    nearest = torch.where(above % 2 == 0, above, below)  # ties to even
    return (table[nearest] * blocks.sign() * steps).flatten(-2).to(x.dtype)


def _write(
    tower: Checkpoint,
    own: Mapping[str, TensorInfo],
    dense: Mapping[str, Dense],
    path: Path,
) -> None:
    """Write safetensors: unchanged floats, and dequantized weights one at a time."""
    decoded = {name: TensorInfo("F32", each.shape) for name, each in dense.items()}
    header, position = {}, 0
    for name, info in (infos := {**own, **decoded}).items():
        header[name] = {"dtype": info.dtype, "shape": list(info.shape),
                        "data_offsets": [position, position + info.num_bytes]}  # fmt: skip
        position += info.num_bytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()

    def pieces() -> Iterator[memoryview]:
        for name in infos:
            if name in dense:
                yield as_bytes(dense[name].load())
            else:
                yield from tower.tensors.stream(name)

    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for piece in pieces():
            stream.write(piece)
