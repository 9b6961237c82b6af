"""Repacks 4-bit and 8-bit weights as INT4 in the documented blocks of TensorRT, with equal results.

The guide documents INT4 blocks of 64 and 128 inputs, with positive scales. Headers of 10.13 to 11.1
have blocks for INT4, FP4 and FP8, not INT8. Other weights become two codes for each input, which is
repeated:

* blocks of 32: the second code is 0, so that 64 codes share a scale,
* a negative scale: its codes are negated, and 8, which INT4 lacks, is 7 and 1,
* INT8: a code is 16 a + b + 8, and 8 is a factor of the sum of a block's inputs.

https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/quantized-types-schemes.html
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.linears.weights import LinearWeight, WeightPart
from edgellm.core.errors import UnsupportedModelError

TAKEN = (64, 128)
HALF_CODES = 8  # difference of an INT8 code and its two INT4 codes


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a weight's codes."""

    run: int  # neighbouring inputs that are repeated together; they share a stored scale
    codes_each: int  # codes of an input
    block_size: int  # codes that share a scale

    @property
    def splits(self) -> bool:
        """Whether the two codes have different scales (INT8)."""
        return self.codes_each == 2 and self.block_size == self.run


def layout_of(weight: LinearWeight) -> Layout | None:
    """The layout of a weight; None for other kinds, and for blocks that are too small."""
    part = weight.parts[0]
    shared = part.block_size or part.shape[0]
    if part.kind == "int4" and not has_signs(weight):
        size = _largest(shared, TAKEN)
        if size:
            return Layout(size, 1, size)
    if part.kind == "int4":
        half = _largest(shared, [size // 2 for size in TAKEN])
        return Layout(half, 2, 2 * half) if half else None
    if part.kind == "int8" and part.block_size and (size := _largest(shared, TAKEN)):
        return Layout(size, 2, size)
    return None


def is_too_small(part: WeightPart) -> bool:
    """Whether 4-bit or 8-bit blocks are too small for a layout; they become floats."""
    if part.kind == "int8":
        return bool(part.block_size) and not _largest(part.block_size, TAKEN)
    return part.kind == "int4" and bool((part.block_size or part.shape[0]) % (TAKEN[0] // 2))


def has_signs(weight: LinearWeight) -> bool:
    """Whether a scale is negative."""
    return any(bool((part.scales() < 0).any()) for part in weight.parts)


def refuse_signs(weight: LinearWeight) -> None:
    """Raise `UnsupportedModelError` for negative scales that no layout supports."""
    has_8_bits = weight.kind in ("int8", "fp8") and not is_too_small(weight.parts[0])
    if has_8_bits and has_signs(weight):
        raise UnsupportedModelError(
            f"TensorRT does not support the negative scales of this {weight.kind.upper()}",
            hint="quantize it with edgellm-quantize, or build it with --backend onnxruntime",
        )


def notes_of_blocks(weights: Iterable[LinearWeight]) -> Iterator[str]:
    """Notes on layers that cost more than their precision implies."""
    layers = [weight for weight in weights if weight.kind in ("int4", "int8")]
    layouts = [layout for weight in layers if (layout := layout_of(weight)) is not None]
    if twice := sum(layout.codes_each == 2 and not layout.splits for layout in layouts):
        yield (
            f"{twice} layers of INT4 take 8 bits a weight, with equal products: TensorRT wants "
            "blocks of 64 or 128 and positive scales, as edgellm-quantize makes them with "
            "--block_size 64 --target gpu"
        )
    if floats := sum(is_too_small(weight.parts[0]) for weight in layers):
        yield f"{floats} layers are floats: TensorRT takes no blocks as small as theirs"


def _largest(shared: int, sizes: Sequence[int]) -> int:
    """The largest of these sizes that divides `shared`; 0: none."""
    return max((size for size in sizes if shared % size == 0), default=0)


def lay_out(layout: Layout, codes: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """INT4 codes, int8 [out, in * codes_each].

    Args:
        layout: of these codes.
        codes: int16 [out, in]; those of INT8 less `HALF_CODES`.
        factors: [out, in / run]; those of INT8 are positive.
    """
    runs = codes.reshape(len(codes), -1, layout.run)
    negated = np.where(factors[..., None] < 0, -runs, runs)
    if layout.codes_each == 1:
        return negated.reshape(len(codes), -1).astype(np.int8)
    if layout.splits:
        low = (negated + 8) % 16 - 8
        pairs = (negated - low) // 16, low
    else:
        low = np.minimum(negated, 7)
        pairs = low, negated - low
    return np.stack(pairs, 2).reshape(len(codes), -1).astype(np.int8)


def scales_of(layout: Layout, factors: np.ndarray) -> np.ndarray:
    """Positive scales [out, blocks] of factors [out, in / run]."""
    magnitudes = np.abs(factors)
    if not layout.splits:
        return magnitudes
    pairs = np.stack([magnitudes * factors.dtype.type(16), magnitudes], 2)
    return pairs.reshape(len(factors), -1)


def spread(graph: GraphEditor, x: ir.Value, layout: Layout, in_features: int) -> ir.Value:
    """Inputs [..., in] in the order of the codes, [..., in * codes_each]."""
    if layout.codes_each == 1:
        return x
    leading = [0] * ((x.shape.rank() if x.shape is not None else 3) - 1)
    runs = [*leading, in_features // layout.run, layout.run]
    apart = graph.constant(f"runs.{runs}", np.array(runs, np.int64))
    whole = [*leading, in_features * layout.codes_each]
    joined = graph.constant(f"spread.{whole}", np.array(whole, np.int64))
    pieces = [graph.node("Reshape", [x, apart])] * layout.codes_each
    return graph.node("Reshape", [graph.node("Concat", pieces, axis=len(leading) + 1), joined])
