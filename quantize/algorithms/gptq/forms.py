"""Forms of linear layers that GPTQ supports: grid, stored tensors, description."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from edgellm.export.checkpoints.checkpoint import TensorInfo
from edgellm.quantize.algorithms.gptq.float_grids import Fp8Grid, Nvfp4Grid
from edgellm.quantize.algorithms.gptq.rounding import Grid, IntegerGrid, Rounded
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
        """The quantized value of the largest input; 0: float inputs."""
        ...

    @property
    def input_kind(self) -> str:
        """The kind of quantized inputs, see `round_input`."""
        ...

    def grid(self, weight: torch.Tensor) -> Grid:
        """Return the grid of a weight [out, in]."""
        ...

    def tensors(self, name: str, rounded: Rounded, grid: Grid) -> dict[str, Tensor]:
        """Return the weight `name` and its scales in ModelOpt's layout."""
        ...

    def described(self) -> dict[str, Any]:
        """Return the entry of hf_quant_config.json; without smoothing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4:
    """INT4 with a scale for each block of inputs, which may be negative if `has_signs`."""

    block: int
    has_signs: bool = False
    largest_input: float = 0.0
    input_kind: str = ""

    def grid(self, weight: torch.Tensor) -> Grid:
        """See `Form`."""
        del weight
        return IntegerGrid(lowest=-8, highest=7, block=self.block, has_signs=self.has_signs)

    def tensors(self, name: str, rounded: Rounded, grid: Grid) -> dict[str, Tensor]:
        """See `Form`; two values a byte."""
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
    """INT8 with a scale for each output."""

    largest_input: float = 0.0
    input_kind: str = ""

    def grid(self, weight: torch.Tensor) -> Grid:
        """See `Form`."""
        del weight
        return IntegerGrid(lowest=-127, highest=127, block=0)

    def tensors(self, name: str, rounded: Rounded, grid: Grid) -> dict[str, Tensor]:
        """See `Form`; one value a byte."""
        del grid
        codes = rounded.codes.cpu().numpy().astype(np.int8)
        return {name: _stored("I8", codes), f"{name}_scale": _floats(rounded.scales[:, 0])}

    def described(self) -> dict[str, Any]:
        """See `Form`."""
        return {"quant_algo": "W8A16"}


@dataclass(frozen=True, slots=True)
class Fp8:
    """E4M3 with one scale, for weight and inputs, as ModelOpt's FP8."""

    largest_input: float = LARGEST_E4M3
    input_kind: str = "fp8"

    def grid(self, weight: torch.Tensor) -> Grid:
        """See `Form`; it fits the largest weight."""
        return Fp8Grid.of(weight)

    def tensors(self, name: str, rounded: Rounded, grid: Grid) -> dict[str, Tensor]:
        """See `Form`; one value a byte."""
        del grid
        codes = rounded.codes.to(torch.float8_e4m3fn).view(torch.uint8).cpu().numpy()
        scale = np.array(float(rounded.scales[0, 0]), np.float32)
        return {name: _stored("F8_E4M3", codes), f"{name}_scale": plain_tensor(scale)}

    def described(self) -> dict[str, Any]:
        """See `Form`."""
        return {"quant_algo": "FP8"}


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """E2M1 in blocks of 16 with E4M3 scales, for weight and inputs."""

    largest_input: float = LARGEST_E2M1 * LARGEST_E4M3
    input_kind: str = "nvfp4"

    def grid(self, weight: torch.Tensor) -> Grid:
        """See `Form`; it fits the largest weight."""
        return Nvfp4Grid.of(weight)

    def tensors(self, name: str, rounded: Rounded, grid: Grid) -> dict[str, Tensor]:
        """See `Form`; two values a byte."""
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


# By name; arguments are the group size of INT4, and whether its scales may be negative
FORMS: dict[str, Callable[[int, bool], Form]] = {
    "int4": lambda block, has_signs: Int4(block=block, has_signs=has_signs),
    "int8": lambda *_: Int8(),
    "fp8": lambda *_: Fp8(),
    "nvfp4": lambda *_: Nvfp4(),
}


def _stored(dtype: str, codes: np.ndarray) -> Tensor:
    return Tensor(TensorInfo(dtype, codes.shape), np.ascontiguousarray(codes).tobytes())


def _floats(values: torch.Tensor) -> Tensor:
    return plain_tensor(values.float().cpu().numpy())
