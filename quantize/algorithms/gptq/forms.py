"""What a linear layer may become under error feedback: grid, tensors, what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from edgellm.export.checkpoints.hf import TensorInfo
from edgellm.quantize.algorithms.gptq.float_grids import Fp8Grid, Nvfp4Grid
from edgellm.quantize.algorithms.gptq.rounding import Grid, Rounded, WholeNumbers
from edgellm.quantize.formats.activation_rounding import nearest_e2m1
from edgellm.quantize.formats.modelopt import (
    LARGEST_E2M1,
    LARGEST_E4M3,
    NVFP4_BLOCK,
    pack_int4_codes,
)
from edgellm.quantize.formats.tensors import Tensor, plain_tensor


class Form(Protocol):
    """One way to store a linear layer."""

    @property
    def largest_input(self) -> float:
        """What the largest input becomes before its calibrated scale; 0: inputs stay floats."""
        ...

    @property
    def input_kind(self) -> str:
        """How inputs are rounded, see `round_input`."""
        ...

    def grid(self, weight: torch.Tensor) -> Grid:
        """What the codes of a weight [out, in] may be."""
        ...

    def tensors(self, name: str, rounded: Rounded, grid: Grid) -> dict[str, Tensor]:
        """The weight `name` and its scales as ModelOpt's layout has them."""
        ...

    def described(self) -> dict[str, Any]:
        """As hf_quant_config.json describes it; nothing is smoothed."""
        ...


@dataclass(frozen=True, slots=True)
class Int4:
    """Blocks of inputs with a scale each, which may be negative if `has_signs`."""

    block: int
    has_signs: bool = False
    largest_input: float = 0.0
    input_kind: str = ""

    def grid(self, weight: torch.Tensor) -> Grid:
        """Whatever the weight."""
        del weight
        return WholeNumbers(-8, 7, self.block, self.has_signs)

    def tensors(self, name: str, rounded: Rounded, grid: Grid) -> dict[str, Tensor]:
        """Pairs of codes."""
        del grid
        packed = pack_int4_codes(rounded.codes.cpu().numpy().astype(np.int8))
        return {name: _stored("U8", packed), f"{name}_scale": _floats(rounded.scales)}

    def described(self) -> dict[str, Any]:
        """See `Form`."""
        return {
            "quant_algo": "W4A16_AWQ",
            "group_size": self.block,
            "has_zero_point": False,
            "pre_quant_scale": False,
        }


@dataclass(frozen=True, slots=True)
class Int8:
    """A scale for each output."""

    largest_input: float = 0.0
    input_kind: str = ""

    def grid(self, weight: torch.Tensor) -> Grid:
        """Whatever the weight."""
        del weight
        return WholeNumbers(-127, 127, 0)

    def tensors(self, name: str, rounded: Rounded, grid: Grid) -> dict[str, Tensor]:
        """Codes of a byte."""
        del grid
        codes = rounded.codes.cpu().numpy().astype(np.int8)
        return {name: _stored("I8", codes), f"{name}_scale": _floats(rounded.scales[:, 0])}

    def described(self) -> dict[str, Any]:
        """See `Form`."""
        return {"quant_algo": "W8A16"}


@dataclass(frozen=True, slots=True)
class Fp8:
    """E4M3 with one scale, as readers of ModelOpt's FP8 expect it; inputs likewise."""

    largest_input: float = LARGEST_E4M3
    input_kind: str = "fp8"

    def grid(self, weight: torch.Tensor) -> Grid:
        """That of the weight's largest."""
        return Fp8Grid.of(weight)

    def tensors(self, name: str, rounded: Rounded, grid: Grid) -> dict[str, Tensor]:
        """Codes of a byte."""
        del grid
        codes = rounded.codes.to(torch.float8_e4m3fn).view(torch.uint8).cpu().numpy()
        scale = np.array(float(rounded.scales[0, 0]), np.float32)
        return {name: _stored("F8_E4M3", codes), f"{name}_scale": plain_tensor(scale)}

    def described(self) -> dict[str, Any]:
        """See `Form`."""
        return {"quant_algo": "FP8"}


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """E2M1 in blocks of 16 inputs, with E4M3 scales; inputs likewise."""

    largest_input: float = LARGEST_E2M1 * LARGEST_E4M3
    input_kind: str = "nvfp4"

    def grid(self, weight: torch.Tensor) -> Grid:
        """That of the weight's largest."""
        return Nvfp4Grid.of(weight)

    def tensors(self, name: str, rounded: Rounded, grid: Grid) -> dict[str, Tensor]:
        """Pairs of codes."""
        assert isinstance(grid, Nvfp4Grid)
        signs = 8 * torch.signbit(rounded.codes)
        codes = (nearest_e2m1(rounded.codes.abs()) + signs).to(torch.uint8)
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4).cpu().numpy()
        scales = grid.stored(rounded.scales).to(torch.float8_e4m3fn).view(torch.uint8)
        return {
            name: _stored("U8", packed),
            f"{name}_scale": _stored("F8_E4M3", scales.cpu().numpy()),
            f"{name}_scale_2": plain_tensor(np.array(grid.factor, np.float32)),
        }

    def described(self) -> dict[str, Any]:
        """See `Form`."""
        return {"quant_algo": "NVFP4", "group_size": NVFP4_BLOCK}


# By the name of a scheme or of a form of mixed precision; they are given the size of INT4's blocks,
# and whether its scales have signs.
FORMS: dict[str, Callable[[int, bool], Form]] = {
    "int4": Int4,
    "int8": lambda *_: Int8(),
    "fp8": lambda *_: Fp8(),
    "nvfp4": lambda *_: Nvfp4(),
}


def _stored(dtype: str, codes: np.ndarray) -> Tensor:
    return Tensor(TensorInfo(dtype, codes.shape), np.ascontiguousarray(codes).tobytes())


def _floats(values: torch.Tensor) -> Tensor:
    return plain_tensor(values.float().cpu().numpy())
