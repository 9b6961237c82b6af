"""A quantized checkpoint as floats, for `--verify`: what its codes stand for, as files.

Inputs that a layer rounds are rounded by hooks of transformers' modules of that name.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from edgellm.contract import EdgeLLMError
from edgellm.export import quantized
from edgellm.export.bundle import ExportOptions, quantized_layers
from edgellm.export.checkpoint import Checkpoint, TensorInfo
from edgellm.export.quantized.operand import QuantizedLinear
from edgellm.export.weights import StoredTensor, Weights

F32 = np.ndarray  # float32
_COMPANIONS = ("bias",)  # of a layer's tensors, what its codes are not
_HINT = "the bundle is written; llm_build compares what it makes of it"


@dataclass(frozen=True, slots=True)
class Input:
    """What a layer does to its input before it multiplies."""

    smooth: F32 | None  # [in]
    dtype: ir.DataType | None = None  # INT8 or FLOAT8E4M3FN; None: it is not rounded
    scale: float = 1.0


def write_floats(checkpoint: Checkpoint, options: ExportOptions, folder: Path) -> dict[str, Input]:
    """Write config.json and weights of the same model in floats.

    Returns:
        What layers do to their inputs, by their names.

    Raises:
        EdgeLLMError: weights that ONNX Runtime cannot decode on a CPU, or that transformers holds
            otherwise.
    """
    tower, shapes = quantized_layers(checkpoint, options)
    weights, inputs = Weights(tower.tensors, tower.quant_config), {}
    dense: dict[str, Callable[[], F32]] = {}
    for prefix, shape in shapes.items():
        layer = weights / prefix
        found = quantized.find(layer, shape, ir.DataType.FLOAT)
        if not isinstance(found, QuantizedLinear) or found.global_scale is not None:
            raise EdgeLLMError(
                f"--verify: ONNX Runtime does not decode the weights of {prefix} on CPUs",
                hint=_HINT,
            )
        smooth = None
        if layer.info("pre_quant_scale") is not None:
            stored = layer.take("pre_quant_scale", shape[1:], ir.DataType.FLOAT)
            smooth = _values(stored).astype(np.float32)
        if smooth is not None or found.input is not None:
            how = found.input
            inputs[prefix] = Input(smooth) if how is None else Input(smooth, how.dtype, how.scale)
        dense[f"{prefix}.weight"] = lambda found=found, shape=shape: decoded(found, shape)
    _write(tower, shapes, dense, folder / "model.safetensors")
    config = {key: value for key, value in tower.config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return inputs


def decoded(linear: QuantizedLinear, shape: tuple[int, int]) -> F32:
    """The weight [out, in] that codes [in, out] stand for."""
    codes, scales = _values(linear.codes).astype(np.float32), _values(linear.scales)
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
        return (x,)

    return before


def _values(stored: StoredTensor) -> np.ndarray:
    """A tensor of the bundle as numbers."""
    data = b"".join(bytes(piece) for piece in stored.stream())
    if stored.dtype.bitwidth < 8:
        packed = np.frombuffer(data, np.uint8)
        return ir.PackedTensor(packed, stored.dtype, shape=ir.Shape(stored.shape)).numpy()
    return np.frombuffer(data, stored.dtype.numpy()).reshape(stored.shape)


def _write(
    tower: Checkpoint,
    shapes: Mapping[str, tuple[int, int]],
    dense: Mapping[str, Callable[[], F32]],
    path: Path,
) -> None:
    """Safetensors: floats as they are, and decoded weights, one at a time."""
    own = {
        name: info
        for name, info in tower.tensors.infos().items()
        if name.rpartition(".")[0] not in shapes or name.endswith(_COMPANIONS)
    }
    decoded = {f"{name}.weight": TensorInfo("F32", shape) for name, shape in shapes.items()}
    header, position = {}, 0
    for name, info in (infos := {**own, **decoded}).items():
        header[name] = {"dtype": info.dtype, "shape": list(info.shape),
                        "data_offsets": [position, position + info.num_bytes]}  # fmt: skip
        position += info.num_bytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()

    def pieces() -> Iterator[memoryview]:
        for name in infos:
            if name in dense:
                yield dense[name]().data.cast("B")
            else:
                yield from tower.tensors.stream(name)

    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for piece in pieces():
            stream.write(piece)
