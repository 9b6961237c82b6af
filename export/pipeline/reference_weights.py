"""Dequantizes layers by the definitions of their formats: the oracle of `--verify`.

It shares no code with `export.checkpoints.quantized`, which it verifies. Packed integers are
streams of bits, the lowest first. Sources: GPTQModel 7.7, AutoAWQ 0.2.9, auto-round 0.16,
compressed-tensors 0.20, nvidia-modelopt 0.47, DeepSeek-V3's FP8 blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm.export.checkpoints.checkpoint import TensorSource, read_whole

F32 = np.ndarray  # float32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code, without its sign
_FP4 = np.array([*E2M1, *(-value for value in E2M1)], np.float32)
_MARKS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")
_PARTS = (
    *_MARKS,
    "weight",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "qzeros",
    "scales",
    "g_idx",
    "weight_g_idx",
    "input_scale",
    "activation_scale",
    "input_global_scale",
    "pre_quant_scale",
)
_AS_THEY_ARE = ("gptq_v2", "auto_round", "auto_round:gptqmodel")  # zero points, not minus one
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # order of neighbours in a word


@dataclass(frozen=True, slots=True)
class Input:
    """Smoothing and rounding of a layer's input: `round(x * smooth)`."""

    smooth: F32 | None = None  # [in]
    rounds: str = ""  # to "int8", "fp8" or "fp4", with `scale`
    scale: float = 1.0

    @property
    def changes(self) -> bool:
        """Whether it changes the input."""
        return self.smooth is not None or bool(self.rounds)


def quantized_names(tensors: TensorSource) -> set[str]:
    """All modules with quantized weights."""
    split = (name.rpartition(".") for name in tensors.infos())
    return {module for module, _, own in split if own in _MARKS}


def read_weight(
    tensors: TensorSource, config: Mapping[str, Any], name: str, shape: tuple[int, int]
) -> F32:
    """The weight [out, in] of a quantized layer.

    Args:
        tensors: of the checkpoint.
        config: its quantization config.
        name: of the layer.
        shape: of its weight.
    """
    found = {own: _read(tensors, f"{name}.{own}") for own in _parts(tensors, name)}
    if "qweight" in found:
        is_awq = found["qweight"].shape[0] == shape[1]
        return _awq(found) if is_awq else _gptq(found, config, shape)
    if "weight_packed" in found and found["weight_packed"].dtype == np.int32:
        return _packed(found, shape)
    if found.get("weight_scale", np.zeros(0)).dtype == np.uint8:  # exponents
        found["weight_scale"] = np.exp2(found["weight_scale"].astype(np.float32) - 127)
        pairs = found["weight_packed" if "weight_packed" in found else "weight"]
        if pairs.dtype == np.uint8:
            return _fp4(pairs, found["weight_scale"], 1, 32)
    if "weight_packed" in found:
        largest = 1 / np.float64(found["weight_global_scale"].item())
        return _fp4(found["weight_packed"], found["weight_scale"], largest)
    if "weight_scale_2" in found:
        return _fp4(found["weight"], found["weight_scale"], found["weight_scale_2"].item())
    return _int4(found) if found["weight"].dtype == np.uint8 else _scaled(found)


def read_input(tensors: TensorSource, name: str) -> Input:
    """Smoothing and rounding of the input of the layer `name`."""
    own, smooth = _parts(tensors, name), None
    if "pre_quant_scale" in own:
        smooth = _read(tensors, f"{name}.pre_quant_scale")
    if "input_global_scale" in own:
        return Input(smooth, "fp4", 1 / _read(tensors, f"{name}.input_global_scale").item())
    scale = next((part for part in ("input_scale", "activation_scale") if part in own), None)
    if scale is None:
        return Input(smooth)
    kind = {"F8_E4M3": "fp8", "I8": "int8", "U8": "fp4"}[tensors.infos()[f"{name}.weight"].dtype]
    return Input(smooth, kind, _read(tensors, f"{name}.{scale}").item())


def _parts(tensors: TensorSource, name: str) -> list[str]:
    infos = tensors.infos()
    return [part for part in _PARTS if f"{name}.{part}" in infos]


def _read(tensors: TensorSource, name: str) -> np.ndarray:
    """A tensor; all floats as float32."""
    import torch

    kinds = {
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I8": torch.int8,
        "U8": torch.uint8,
        "I32": torch.int32,
        "I64": torch.int64,
    }
    info = tensors.infos()[name]
    stored = torch.frombuffer(read_whole(tensors, name), dtype=kinds[info.dtype])
    stored = stored.reshape(info.shape)
    return (stored.float() if stored.dtype.is_floating_point else stored).numpy()


def _fields(words: np.ndarray, bits: int) -> np.ndarray:
    """int32 [rows, n] as a stream of bits: numbers [rows, 32 n / bits]."""
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    return stream.reshape(len(words), -1, bits) @ (1 << np.arange(bits))


def _gptq(found: Mapping[str, Any], config: Mapping[str, Any], shape: tuple[int, int]) -> F32:
    """`qweight` is a stream along the inputs, `qzeros` [groups] along the outputs."""
    words, scales = found["qweight"], found["scales"]
    bits = 32 * len(words) // shape[1]
    codes = _fields(words.T, bits)
    zeros = _fields(found["qzeros"], bits)
    keys = ("packing_format", "checkpoint_format", "format")
    if not any(str(config.get(key)).lower() in _AS_THEY_ARE for key in keys):
        zeros = zeros + 1
    if config.get("sym") and not (config.get("extra_config") or config.get("dynamic")):
        zeros = np.full_like(zeros, 1 << (bits - 1))  # kernels for symmetric weights assume this
    groups = found.get("g_idx", np.arange(shape[1]) // (shape[1] // len(scales)))
    return ((codes - zeros.T[:, groups]) * scales.T[:, groups]).astype(np.float32)


def _awq(found: Mapping[str, Any]) -> F32:
    """`qweight` [in, out / 8] and `qzeros` [groups, out / 8] in AWQ's order."""
    place = np.argsort(_AWQ_ORDER)
    codes, zeros = (
        _fields(found[name], 4)
        .reshape(len(found[name]), -1, 8)[..., place]
        .reshape(len(found[name]), -1)
        for name in ("qweight", "qzeros")
    )
    groups = np.arange(len(codes)) // (len(codes) // len(zeros))
    return np.ascontiguousarray(
        ((codes - zeros[groups]) * found["scales"][groups]).T, dtype=np.float32
    )


def _packed(found: Mapping[str, Any], shape: tuple[int, int]) -> F32:
    """`weight_packed` [out, in * bits / 32], zero points a stream along the outputs."""
    out, width = shape
    bits = 32 * found["weight_packed"].shape[1] // width
    codes, scales = _fields(found["weight_packed"], bits), found["weight_scale"]
    zeros = np.full(scales.shape, 1 << (bits - 1))
    if "weight_zero_point" in found:
        zeros = _fields(found["weight_zero_point"].T, bits)[:, :out].T
    groups = found.get("weight_g_idx", np.full(width, -1))
    if -1 in groups:  # the order is not stored
        groups = np.arange(width) // (width // scales.shape[1])
    return ((codes - zeros[:, groups]) * scales[:, groups]).astype(np.float32)


def _nibbles(pairs: np.ndarray) -> np.ndarray:
    """uint8 [rows, n] -> [rows, 2 n], the low half first."""
    return np.stack([pairs & 15, pairs >> 4], -1).reshape(len(pairs), -1)


def _fp4(pairs: np.ndarray, scales: F32, largest: float, block: int = 16) -> F32:
    """NVFP4: two inputs per byte, a scale for 16 of them (MXFP4: 32), a global scale."""
    steps = np.repeat(scales * np.float32(largest), block, axis=1)
    return _FP4[_nibbles(pairs)] * steps


def _int4(found: Mapping[str, Any]) -> F32:
    """ModelOpt: two outputs a byte in two's complement, scales [out, groups]."""
    codes = _nibbles(found["weight"].T).T.astype(np.int32)
    codes, scales = np.where(codes > 7, codes - 16, codes), found["weight_scale"]
    return codes.astype(np.float32) * np.repeat(scales, codes.shape[1] // scales.shape[1], axis=1)


def _scaled(found: Mapping[str, Any]) -> F32:
    """8-bit codes times scales: per tensor, per output, per block of inputs, or per 2-D block.

    The last block of outputs or inputs may be smaller; a block has as many outputs as inputs.
    """
    codes = found["weight"].astype(np.float32)
    scales = found["weight_scale_inv" if "weight_scale_inv" in found else "weight_scale"]
    if scales.size == 1:
        return codes * scales.reshape(())
    if scales.ndim == 4:  # [rows, 1, columns, 1]
        scales = scales[:, 0, :, 0]
    scales = scales.reshape(len(scales), -1)
    columns = codes.shape[1] // scales.shape[1]
    rows = 1 if len(scales) == len(codes) else columns
    steps = np.repeat(np.repeat(scales, rows, 0), columns, 1)
    return codes * steps[: len(codes)]
