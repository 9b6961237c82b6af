"""Synthetic checkpoints in every quantized layout, by the layouts' definitions.

Each writer rounds a weight [out, in] somehow and returns its tensors by their last name, together
with the float32 weight that they stand for. Nothing here uses edgellm's own packing.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import load_file, save_file

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
INPUT_SCALE_FP8, INPUT_SCALE_INT8, INPUT_SCALE_FP4 = 0.011, 0.021, 0.0013
Tensors = dict[str, np.ndarray]
Writer = Callable[[np.ndarray, np.random.Generator], tuple[Tensors, np.ndarray]]


def e4m3(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)


def _pack32(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """[rows, columns] unsigned -> int32 words of neighbours in a row, the first in low bits."""
    per_word = 32 // bits
    rows, columns = values.shape
    words = np.zeros((rows, -(-columns // per_word)), np.uint64)
    for column in range(columns):
        place = column % per_word
        if order is not None:
            place = order.index(place)
        words[:, column // per_word] |= values[:, column].astype(np.uint64) << (bits * place)
    return words.astype(np.uint32).view(np.int32)


def _integers(
    weight: np.ndarray, bits: int, group: int, *, symmetric: bool, has_signs: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unsigned codes [out, in], zero points and scales [out, in / group].

    With signs a block's largest weight takes the lowest code, as AutoRound does it.
    """
    out, width = weight.shape
    blocks = weight.reshape(out, -1, group)
    top = 2**bits - 1
    if symmetric:
        scale = np.abs(blocks).max(-1) / (top / 2)
        if has_signs:
            scale = np.where(blocks.max(-1) > -blocks.min(-1), -scale, scale)
        zero = np.full(scale.shape, 2 ** (bits - 1))
    else:
        low, high = blocks.min(-1), blocks.max(-1)
        scale = (high - low) / top
        zero = np.clip(np.rint(-low / scale), 0, top - 1)
    scale = scale.astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint(blocks / scale[..., None]) + zero[..., None], 0, top)
    return codes.reshape(out, width).astype(np.uint8), zero.astype(np.uint8), scale


def _value(codes: np.ndarray, zero: np.ndarray, scale: np.ndarray) -> np.ndarray:
    group = codes.shape[1] // scale.shape[1]
    shifted = codes.astype(np.float32) - np.repeat(zero.astype(np.float32), group, 1)
    return shifted * np.repeat(scale, group, 1)


def int4(
    weight: np.ndarray,
    random: np.random.Generator,
    signs: tuple[int, ...] = (-1, 1),
    groups: tuple[int, ...] = (16,),
) -> tuple[Tensors, np.ndarray]:
    """ModelOpt W4A16_AWQ, with smoothing that is not folded, and signs of scales (ours alone)."""
    width = weight.shape[1]
    group = next(size for size in groups if width % size == 0 and width > size)
    codes, zero, scale = _integers(weight, 4, group, symmetric=True)
    sign = random.choice(np.array(signs, np.float32), scale.shape)
    scale, turned = scale * sign, np.repeat(sign, codes.shape[1] // scale.shape[1], 1) < 0
    codes = np.where(turned, np.minimum(16 - codes.astype(int), 15), codes).astype(np.uint8)
    smoothing = random.uniform(0.5, 2, weight.shape[1]).astype(np.float32)
    signed = (codes.astype(np.int16) - 8) & 15
    tensors = {
        "weight": (signed[0::2] | signed[1::2] << 4).astype(np.uint8),
        "weight_scale": scale,
        "pre_quant_scale": smoothing,
    }
    return tensors, _value(codes, zero, scale) * smoothing


def fp8(weight: np.ndarray, random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """ModelOpt FP8: one scale of the weight, one of the input."""
    del random
    scale = np.float32(np.abs(weight).max() / 448)
    codes = e4m3(weight / scale)
    tensors = {
        "weight": codes,
        "weight_scale": np.array(scale),
        "input_scale": np.array(INPUT_SCALE_FP8, np.float32),
    }
    return tensors, codes.astype(np.float32) * scale


def fp8_channels(weight: np.ndarray, random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """compressed-tensors float-quantized: a scale of each channel, inputs rounded at run time."""
    del random
    scale = (np.abs(weight).max(1, keepdims=True) / 448).astype(np.float32)
    codes = e4m3(weight / scale)
    return {"weight": codes, "weight_scale": scale}, codes.astype(np.float32) * scale


def fp8_blocks(
    weight: np.ndarray,
    random: np.random.Generator,
    name: str = "weight_scale_inv",
    size: int = 16,
    *,
    powers: bool = False,
) -> tuple[Tensors, np.ndarray]:
    """Square blocks, cut at the last outputs when there are no multiples of them.

    `powers`: scales are powers of two, as exponents (E8M0).
    """
    del random
    out, width = weight.shape
    scale = np.zeros((-(-out // size), width // size), np.float32)
    codes = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn)
    value = np.zeros_like(weight)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            place = (slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size))
            scale[row, column] = np.abs(weight[place]).max() / 448
            if powers:
                scale[row, column] = 2 ** np.ceil(np.log2(scale[row, column]))
            codes[place] = e4m3(weight[place] / scale[row, column])
            value[place] = codes[place].astype(np.float32) * scale[row, column]
    stored = scale.astype(ml_dtypes.float8_e8m0fnu) if powers else scale
    return {"weight": codes, name: stored}, value


def fp8_blocks_modelopt(
    weight: np.ndarray, random: np.random.Generator
) -> tuple[Tensors, np.ndarray]:
    """ModelOpt FP8_PB_WO: scales have the shape of its block quantizer's maxima."""
    tensors, value = fp8_blocks(weight, random, "weight_scale")
    return {**tensors, "weight_scale": tensors["weight_scale"][:, None, :, None]}, value


def fp8_whole(weight: np.ndarray, random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """FP8 by transformers with `weight_block_size` null, as Ministral 3."""
    tensors, value = fp8(weight, random)
    return {
        "weight": tensors["weight"],
        "weight_scale_inv": tensors["weight_scale"],
        "activation_scale": tensors["input_scale"],
    }, value


def int8_smoothed(weight: np.ndarray, random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """ModelOpt W8A8_SQ_PER_CHANNEL."""
    smoothing = random.uniform(0.5, 2, weight.shape[1]).astype(np.float32)
    scale = (np.abs(weight).max(1) / 127).astype(np.float32)
    codes = np.rint(weight / scale[:, None]).astype(np.int8)
    tensors = {
        "weight": codes,
        "weight_scale": scale,
        "pre_quant_scale": smoothing,
        "input_scale": np.array(INPUT_SCALE_INT8, np.float32),
    }
    return tensors, codes * scale[:, None] * smoothing


def ct_int8_signs(weight: np.ndarray, random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """The same from AutoRound, whose scales have signs."""
    tensors, value = ct_int8(weight, random)
    sign = random.choice(np.array([-1, 1], np.int8), tensors["weight_scale"].shape)
    scale = tensors["weight_scale"] * sign
    return {**tensors, "weight": tensors["weight"] * sign, "weight_scale": scale}, value


def ct_int8(weight: np.ndarray, random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """compressed-tensors int-quantized, with the zeros that older writers stored."""
    tensors, value = int8_weights(weight, random)
    scale = tensors["weight_scale"][:, None]
    return {
        **tensors,
        "weight_scale": scale,
        "weight_zero_point": np.zeros(scale.shape, np.int8),
    }, value


def int8_weights(weight: np.ndarray, random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """ModelOpt W8A16."""
    del random
    scale = (np.abs(weight).max(1) / 127).astype(np.float32)
    codes = np.rint(weight / scale[:, None]).astype(np.int8)
    return {"weight": codes, "weight_scale": scale}, codes * scale[:, None]


def ct_int8_groups(weight: np.ndarray, random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """compressed-tensors int-quantized, strategy `group`."""
    del random
    blocks = weight.reshape(len(weight), -1, 16)
    scale = (np.abs(blocks).max(-1) / 127).astype(np.float32)
    codes = np.rint(blocks / scale[..., None]).astype(np.int8)
    value = (codes * scale[..., None]).reshape(weight.shape)
    return {"weight": codes.reshape(weight.shape), "weight_scale": scale}, value


def _nvfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32, np.ndarray]:
    """Codes [out, in], block scales e4m3 [out, in / 16], the global scale, the values."""
    out, width = weight.shape
    blocks = weight.reshape(out, -1, 16)
    largest = np.float32(np.abs(weight).max() / (6 * 448))
    scale = e4m3(np.abs(blocks).max(-1) / 6 / largest)
    floats = scale.astype(np.float32) * largest
    ratio = blocks / floats[..., None]
    codes = np.abs(ratio[..., None] - E2M1).argmin(-1).reshape(out, width)
    return codes, scale, largest, E2M1[codes] * np.repeat(floats, 16, 1)


def _pairs(codes: np.ndarray) -> np.ndarray:
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)


def nvfp4(weight: np.ndarray, random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """ModelOpt NVFP4: blocks of 16, inputs rounded too."""
    del random
    codes, scale, largest, value = _nvfp4(weight)
    tensors = {
        "weight": _pairs(codes),
        "weight_scale": scale,
        "weight_scale_2": np.array(largest),
        "input_scale": np.array(INPUT_SCALE_FP4, np.float32),
    }
    return tensors, value


def ct_nvfp4(weight: np.ndarray, random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """compressed-tensors nvfp4-pack-quantized, weight-only: the global scale is a reciprocal."""
    del random
    codes, scale, largest, value = _nvfp4(weight)
    tensors = {
        "weight_packed": _pairs(codes),
        "weight_scale": scale,
        "weight_global_scale": np.array([1 / np.float64(largest)], np.float32),
    }
    return tensors, value


def _octaves(weight: np.ndarray, largest: float) -> tuple[np.ndarray, np.ndarray]:
    """Powers of two for groups of 32 inputs [out, in / 32], as exponents (E8M0) and floats."""
    blocks = np.abs(weight.reshape(len(weight), -1, 32)).max(-1)
    exponents = np.ceil(np.log2(blocks / largest))
    return (exponents + 127).astype(np.uint8), np.exp2(exponents).astype(np.float32)


def mxfp8(weight: np.ndarray, random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """compressed-tensors mxfp8-quantized, and ModelOpt MXFP8."""
    del random
    exponents, scale = _octaves(weight, 448)
    scale = np.repeat(scale, 32, 1)
    codes = e4m3(weight / scale)
    return {"weight": codes, "weight_scale": exponents}, codes.astype(np.float32) * scale


def ct_mxfp4(
    weight: np.ndarray, random: np.random.Generator, name: str = "weight_packed"
) -> tuple[Tensors, np.ndarray]:
    """compressed-tensors mxfp4-pack-quantized."""
    del random
    exponents, scale = _octaves(weight, 6)
    scale = np.repeat(scale, 32, 1)
    codes = np.abs((weight / scale)[..., None] - E2M1).argmin(-1)
    return {name: _pairs(codes), "weight_scale": exponents}, E2M1[codes] * scale


def ct_int(
    bits: int, *, symmetric: bool, has_signs: bool = False, reordered: bool = False
) -> Writer:
    """compressed-tensors pack-quantized; with activation order codes stay in the inputs' order."""

    def write(weight: np.ndarray, random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        width = weight.shape[1]
        order = random.permutation(width) if reordered else np.arange(width)
        back = np.argsort(order)
        codes, zero, scale = _integers(
            weight[:, order], bits, 16, symmetric=symmetric, has_signs=has_signs
        )
        tensors = {
            "weight_packed": _pack32(codes[:, back], bits),
            "weight_scale": scale.astype(np.float16),
            "weight_shape": np.array(weight.shape, np.int64),
        }
        if not symmetric:
            tensors["weight_zero_point"] = _pack32(zero.T, bits).T
        if reordered:
            tensors["weight_g_idx"] = (np.arange(width) // 16)[back].astype(np.int32)
        return tensors, _value(codes, zero, scale)[:, back]

    return write


def awq(weight: np.ndarray, random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """AutoAWQ gemm: words along `out` in the order 0 2 4 6 1 3 5 7."""
    del random
    codes, zero, scale = _integers(weight, 4, 16, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": _pack32(codes.T, 4, order),
        "qzeros": _pack32(zero.T, 4, order),
        "scales": scale.T.astype(np.float16),
    }
    return tensors, _value(codes, zero, scale)


def gptq(
    bits: int,
    *,
    symmetric: bool,
    reordered: bool = False,
    version: int = 1,
    group: int = 16,
    has_signs: bool = False,
) -> Writer:
    """GPTQ: words along `in`; version 1 stores zero points less one."""

    def write(weight: np.ndarray, random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        width = weight.shape[1]
        order = random.permutation(width) if reordered else np.arange(width)
        codes, zero, scale = _integers(
            weight[:, order], bits, group, symmetric=symmetric, has_signs=has_signs
        )
        zero = np.maximum(zero, 1)
        value, back = _value(codes, zero, scale), np.argsort(order)
        groups = (np.arange(width) // group)[back]
        tensors = {
            "qweight": _pack32(codes[:, back], bits).T,
            "qzeros": _pack32(zero.T - np.uint8(version == 1), bits),
            "scales": scale.T.astype(np.float16),
            "g_idx": groups.astype(np.int32),
        }
        return tensors, value[:, back]

    return write


@dataclass(frozen=True)
class Layout:
    writer: Writer
    config: dict = field(default_factory=dict)  # quantization_config of config.json
    modelopt: dict = field(default_factory=dict)  # of hf_quant_config.json
    rounds: str = ""  # quantization of inputs: "", "fp8", "int8", "fp4"
    kind: str = ""  # the CPU engine's name of it


MODELOPT_INT4 = Layout(
    functools.partial(int4, signs=(1,), groups=(64, 32, 16)),
    modelopt={"quant_algo": "W4A16_AWQ"},
    kind="int4",
)
LAYOUTS = {
    "int4": Layout(int4, modelopt={"quant_algo": "W4A16_AWQ"}, kind="int4"),
    "fp8": Layout(fp8, modelopt={"quant_algo": "FP8"}, rounds="fp8", kind="fp8"),
    "nvfp4": Layout(nvfp4, modelopt={"quant_algo": "NVFP4"}, rounds="fp4", kind="fp4"),
    "int8_sq": Layout(
        int8_smoothed, modelopt={"quant_algo": "W8A8_SQ_PER_CHANNEL"}, rounds="int8", kind="int8"
    ),
    "w8a16": Layout(int8_weights, modelopt={"quant_algo": "W8A16"}, kind="int8"),
    "ct-fp8": Layout(fp8_channels, {"quant_method": "compressed-tensors"}, kind="fp8"),
    "ct-int4": Layout(
        ct_int(4, symmetric=True), {"quant_method": "compressed-tensors"}, kind="int4"
    ),
    "ct-int4-asym": Layout(
        ct_int(4, symmetric=False), {"quant_method": "compressed-tensors"}, kind="int4"
    ),
    "ct-int4-order": Layout(
        ct_int(4, symmetric=False, reordered=True),
        {"quant_method": "compressed-tensors"},
        kind="int4",
    ),
    "ct-int8": Layout(
        ct_int(8, symmetric=True, has_signs=True),
        {"quant_method": "compressed-tensors"},
        kind="int8",
    ),
    "ct-w8a8": Layout(ct_int8, {"quant_method": "compressed-tensors"}, kind="int8"),
    "ct-nvfp4": Layout(ct_nvfp4, {"quant_method": "compressed-tensors"}, kind="fp4"),
    "awq": Layout(awq, {"quant_method": "awq", "version": "gemm"}, kind="int4"),
    "gptq": Layout(gptq(4, symmetric=True), {"quant_method": "gptq"}, kind="int4"),
    "gptq-asym": Layout(gptq(4, symmetric=False), {"quant_method": "gptq"}, kind="int4"),
    "gptq-v2": Layout(
        gptq(4, symmetric=False, version=2),
        {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
        kind="int4",
    ),
    "gptq-8": Layout(gptq(8, symmetric=True), {"quant_method": "gptq"}, kind="int8"),
    "auto-round-8": Layout(
        gptq(8, symmetric=True, has_signs=True),
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "sym": True},
        kind="int8",
    ),
    "auto-round-ct": Layout(
        ct_int(4, symmetric=True, has_signs=True),
        {"quant_method": "compressed-tensors", "provider": "auto-round"},
        kind="int4",
    ),
    "auto-round-w8a8": Layout(
        ct_int8_signs,
        {"quant_method": "compressed-tensors", "provider": "auto-round"},
        kind="int8",
    ),
    "auto-round": Layout(
        gptq(4, symmetric=True, has_signs=True),
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "sym": True},
        kind="int4",
    ),
    "gptq-order": Layout(
        gptq(4, symmetric=False, reordered=True), {"quant_method": "gptq"}, kind="int4"
    ),
    "fp8-blocks": Layout(
        fp8_blocks, {"quant_method": "fp8", "weight_block_size": [16, 16]}, kind="fp8"
    ),
    "fp8-powers": Layout(
        functools.partial(fp8_blocks, powers=True),
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        kind="fp8",
    ),
    "fp8-whole": Layout(
        fp8_whole, {"quant_method": "fp8", "weight_block_size": None}, rounds="fp8", kind="fp8"
    ),
    "ct-fp8-blocks": Layout(
        functools.partial(fp8_blocks, name="weight_scale"),
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"block_structure": [16, 16]}}},
        },
        kind="fp8",
    ),
    "fp8-pb-wo": Layout(
        fp8_blocks_modelopt,
        modelopt={"quant_algo": "FP8_PB_WO", "weight_block_size": [16, 16]},
        kind="fp8",
    ),
    "ct-int8-groups": Layout(ct_int8_groups, {"quant_method": "compressed-tensors"}, kind="int8"),
}

# Widths must be multiples of 32.
MICROSCALED = {
    "ct-mxfp4": Layout(
        ct_mxfp4,
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
        kind="fp4",
    ),
    "mxfp4": Layout(
        functools.partial(ct_mxfp4, name="weight"),
        modelopt={"quant_algo": "W4A16_MXFP4"},
        kind="fp4",
    ),
    "ct-mxfp8": Layout(
        mxfp8, {"quant_method": "compressed-tensors", "format": "mxfp8-quantized"}, kind="fp8"
    ),
    "mxfp8": Layout(mxfp8, modelopt={"quant_algo": "MXFP8"}, kind="fp8"),
}


def write_checkpoint(
    source: Path, folder: Path, layout: Layout, *, but: str = "no layer"
) -> dict[str, np.ndarray]:
    """`source` with its linear layers in `layout`; the weights that they stand for, by name.

    `but`: what layers that stay have in their names.
    """
    random = np.random.default_rng(0)
    tensors: dict[str, torch.Tensor] = {}
    meant: dict[str, np.ndarray] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight") or but in name:
            tensors[name] = tensor
            continue
        stored, meant[name] = layout.writer(tensor.float().numpy(), random)
        for last, array in stored.items():
            tensors[name.removesuffix("weight") + last] = _torch(array)
    shutil.copytree(source, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    if layout.config:
        config["quantization_config"] = layout.config
    (folder / "config.json").write_text(json.dumps(config))
    if layout.modelopt:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": layout.modelopt}))
    return meant


def _torch(array: np.ndarray) -> torch.Tensor:
    array = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.name in ("float8_e4m3fn", "float8_e8m0fnu"):
        return torch.from_numpy(array.view(np.uint8)).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def rounded_input(kind: str, x: torch.Tensor) -> torch.Tensor:
    """Input of a layer of `Layout.rounds` after rounding."""
    array = x.numpy()
    if kind == "fp8":
        limited = np.clip(array / np.float32(INPUT_SCALE_FP8), -448, 448)
        array = e4m3(limited).astype(np.float32) * np.float32(INPUT_SCALE_FP8)
    elif kind == "int8":
        codes = np.clip(np.rint(array / np.float32(INPUT_SCALE_INT8)), -128, 127)
        array = codes * np.float32(INPUT_SCALE_INT8)
    elif kind == "fp4":
        array = _fp4_input(array)
    return torch.from_numpy(array)


def _fp4_input(array: np.ndarray) -> np.ndarray:
    """Blocks of 16 with an FP8 scale each, ties to the even code."""
    blocks = array.reshape(*array.shape[:-1], -1, 16)
    amax = np.abs(blocks).max(-1, keepdims=True)
    scale = e4m3(np.clip(amax / 6 / np.float32(INPUT_SCALE_FP4), 2.0**-9, 448))
    floats = scale.astype(np.float32) * np.float32(INPUT_SCALE_FP4)
    ratio = np.clip(blocks / floats, -6, 6)
    return (ratio.astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * floats).reshape(array.shape)
