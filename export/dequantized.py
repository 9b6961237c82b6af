"""A quantized checkpoint as floats, for `--verify`: what its codes stand for, as files.

Inputs that a layer rounds are rounded by hooks of transformers' modules of that name.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from edgellm.export import quantized
from edgellm.export.bundle import ExportOptions, quantized_layers
from edgellm.export.checkpoint import Checkpoint, TensorInfo
from edgellm.export.dequantized_experts import BLOCKS, FP4_VALUES, Dense, fp4_stack, joined
from edgellm.export.quantized.operand import QuantizedLinear
from edgellm.export.weights import StoredTensor, Weights, as_bytes

F32 = np.ndarray  # float32
_FP4_BLOCK = 16
_COMPANIONS = ("bias",)  # of a layer's tensors, what its codes are not


@dataclass(frozen=True, slots=True)
class Input:
    """What a layer does to its input before it multiplies."""

    smooth: F32 | None  # [in]
    # INT8, FLOAT8E4M3FN, or FLOAT4E2M1 in blocks; None: it is not rounded
    dtype: ir.DataType | None = None
    scale: float = 1.0


def write_floats(checkpoint: Checkpoint, options: ExportOptions, folder: Path) -> dict[str, Input]:
    """Write config.json and weights of the same model in floats.

    Returns:
        What layers do to their inputs, by their names.
    """
    tower, shapes = quantized_layers(checkpoint, options)
    weights, inputs = Weights(tower.tensors, tower.quant_config), {}
    dense: dict[str, Dense] = {}
    for prefix, shape in shapes.items():
        layer = weights / prefix
        found = quantized.find(layer, shape, ir.DataType.FLOAT)
        assert isinstance(found, QuantizedLinear)  # GGUF files are decoded by transformers
        smooth = None
        if layer.info("pre_quant_scale") is not None:
            stored = layer.take("pre_quant_scale", shape[1:], ir.DataType.FLOAT)
            smooth = _values(stored).astype(np.float32)
        if smooth is not None or found.input is not None:
            how = found.input
            inputs[prefix] = Input(smooth) if how is None else Input(smooth, how.dtype, how.scale)
        load = partial(decoded, found, shape)
        dense[f"{prefix}.weight"] = Dense(shape, load)
    own = {
        name: info
        for name, info in tower.tensors.infos().items()
        if name.rpartition(".")[0] not in shapes or name.endswith(_COMPANIONS)
    }
    for name in [name for name in own if name.endswith(BLOCKS)]:
        found = fp4_stack(weights, name, own.pop(name).shape)
        own.pop(found.scales)
        dense[found.name] = found.dense
    _write(tower, own, joined(dense), folder / "model.safetensors")
    config = {key: value for key, value in tower.config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return inputs


def decoded(linear: QuantizedLinear, shape: tuple[int, int]) -> F32:
    """The weight [out, in] that codes [in, out] stand for."""
    codes, scales = _values(linear.codes).astype(np.float32), _values(linear.scales)
    if linear.global_scale is not None:  # NVFP4, [out, in]
        floats = scales.astype(np.float32) * np.float32(linear.global_scale)
        return codes * np.repeat(floats, linear.block_size, 1)
    repeats = linear.block_size if scales.ndim > 1 else 1

    def spread(values: np.ndarray) -> F32:
        return np.repeat(values, repeats, 0) if values.ndim > 1 else values

    if linear.zero_points is not None:
        codes -= spread(_values(linear.zero_points).astype(np.float32))
    weight = (codes * spread(scales.astype(np.float32))).T
    if linear.input_order is None:
        return np.ascontiguousarray(weight)
    ordered = np.empty(shape, np.float32)
    ordered[:, linear.input_order] = weight
    return ordered


def round_inputs(model: Any, inputs: Mapping[str, Input]) -> None:
    """Let modules of transformers do to their inputs what the layers of these names do."""
    modules = dict(model.named_modules())
    for name, facts in inputs.items():
        if name in modules:  # experts take floats
            modules[name].register_forward_pre_hook(_hook(facts))


def _hook(facts: Input) -> Callable[[Any, tuple[Any, ...]], tuple[Any]]:
    import torch

    def before(_: Any, args: tuple[Any, ...]) -> tuple[Any]:
        x = args[0] if facts.smooth is None else args[0] * torch.from_numpy(facts.smooth)
        if facts.dtype == ir.DataType.INT8:
            return (torch.clamp(torch.round(x / facts.scale), -128, 127) * facts.scale,)
        if facts.dtype == ir.DataType.FLOAT8E4M3FN:
            codes = torch.clamp(x / facts.scale, -448, 448).to(torch.float8_e4m3fn)
            return (codes.to(x.dtype) * facts.scale,)
        if facts.dtype == ir.DataType.FLOAT4E2M1:
            return (_through_fp4(x, facts.scale),)
        return (x,)

    return before


def _through_fp4(x: Any, scale: float) -> Any:
    """A tensor of torch as NVFP4 holds it: the nearest value of sixteen, times a block's scale."""
    import torch

    table = torch.tensor(FP4_VALUES)
    blocks = x.unflatten(-1, (-1, _FP4_BLOCK)).float()
    wanted = (blocks.abs().amax(-1, keepdim=True) / table[-1] / scale).clamp(2.0**-9, 448)
    steps = wanted.to(torch.float8_e4m3fn).float() * scale
    above = torch.bucketize(blocks.abs() / steps, (table[1:] + table[:-1]) / 2, right=True)
    below = torch.bucketize(blocks.abs() / steps, (table[1:] + table[:-1]) / 2)
    nearest = torch.where(above % 2 == 0, above, below)  # in the middle the even code
    return (table[nearest] * blocks.sign() * steps).flatten(-2).to(x.dtype)


def _values(stored: StoredTensor) -> np.ndarray:
    """A tensor of the bundle as numbers."""
    data = b"".join(bytes(piece) for piece in stored.stream())
    if stored.dtype.bitwidth < 8:
        packed = np.frombuffer(data, np.uint8)
        return ir.PackedTensor(packed, stored.dtype, shape=ir.Shape(stored.shape)).numpy()
    return np.frombuffer(data, stored.dtype.numpy()).reshape(stored.shape)


def _write(
    tower: Checkpoint,
    own: Mapping[str, TensorInfo],
    dense: Mapping[str, Dense],
    path: Path,
) -> None:
    """Safetensors: floats as they are, and decoded weights, one at a time."""
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
