"""Quantized linear weights of a checkpoint, one module per layout.

A module of this package is a layout when it has the function of `Layout`. Tensors are trusted more
than flags: a linear layer is what its tensors say, config files only tell what tensors cannot.
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
    """The function that a layout's module has."""

    def read(
        self, weights: Weights, shape: tuple[int, int], dtype: ir.DataType
    ) -> QuantizedLinear | BlockWeight | None:
        """The linear layer [out, in] at `weights`, its scales in the graph's `dtype`.

        None when it is not stored in this layout.

        Raises:
            EdgeLLMError: stored in this layout, but not in a way that a graph can express.
        """
        ...


def find(
    weights: Weights, shape: tuple[int, int], dtype: ir.DataType
) -> QuantizedLinear | BlockWeight | None:
    """How the linear layer [out, in] at `weights` is quantized; None where it stays float.

    Raises:
        UnsupportedModelError: quantized in no known layout, or already where it is to be rounded.
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
    """How an embedding [rows, in] at `weights` is stored in blocks; None where it is not."""
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
