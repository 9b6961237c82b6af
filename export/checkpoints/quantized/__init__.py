"""Quantized linear weights of a checkpoint, one module per layout.

A module of this package is a layout if it has the function of `Layout`. Tensors take precedence
over flags: tensors define a linear layer, and config files add only what tensors do not show.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Protocol, cast

import onnx_ir as ir

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.quantized import gguf, modelopt
from edgellm.export.checkpoints.quantized_weight import BlockWeight, QuantizedLinear
from edgellm.export.checkpoints.round_weights import round_linear
from edgellm.export.checkpoints.weights import Weights

_FLOATS = ("F32", "F16", "BF16")
_OWN = ("conventions", "operand", "packed", "rounded")  # modules of this package that are no layout


class Layout(Protocol):
    """Interface of a layout's module."""

    def read(
        self, weights: Weights, shape: tuple[int, int], dtype: ir.DataType
    ) -> QuantizedLinear | BlockWeight | None:
        """The linear layer [out, in] at `weights`, its scales in the graph's `dtype`.

        None if it is not stored in this layout.

        Raises:
            EdgeLLMError: stored in this layout, but in an unsupported form.
        """
        ...


def find(
    weights: Weights, shape: tuple[int, int], dtype: ir.DataType
) -> QuantizedLinear | BlockWeight | None:
    """The quantized linear layer [out, in] at `weights`; None if it is float.

    Raises:
        UnsupportedModelError: an unknown layout, or quantized although it should be rounded.
    """
    info = weights.info("weight")
    if info is not None and info.dtype in _FLOATS:
        return round_linear(weights, shape, dtype) if weights.rounding != "none" else None
    for name in names():
        found = _layout(name).read(weights, shape, dtype)
        if found is not None:
            _expect_float(weights)
            weights.layouts.add(name)
            weights.quantized[weights.prefix.rstrip(".")] = shape
            return found
    if info is None:
        return None
    raise UnsupportedModelError(
        f"{weights.prefix}weight is stored as {info.dtype}: quantized in a way that edgellm "
        "cannot export",
        hint=f"layouts: {', '.join(names())}",
    )


def find_table(weights: Weights, shape: tuple[int, int], dtype: ir.DataType) -> BlockWeight | None:
    """The block-quantized embedding [rows, in] at `weights`; None if it is not."""
    if (found := gguf.read(weights, shape, dtype)) is not None:
        weights.layouts.add("gguf")
        return found
    return modelopt.read_table(weights, shape)


def _expect_float(weights: Weights) -> None:
    if weights.rounding != "none":
        raise UnsupportedModelError(
            f"{weights.prefix.rstrip('.')} is quantized already: it cannot be rounded to "
            f"{weights.rounding}",
            hint="leave out --quantization",
        )


@cache
def names() -> list[str]:
    """All layouts."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


@cache
def _layout(name: str) -> Layout:
    return cast(Layout, importlib.import_module(f"{__name__}.{name}"))
