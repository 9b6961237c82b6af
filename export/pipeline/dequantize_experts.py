"""Dequantizes experts to floats, with transformers' names and shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from edgellm.export.checkpoints.weights import Weights
from edgellm.export.pipeline.reference_weights import E2M1

F32 = np.ndarray  # float32
BLOCKS, _SCALES = "_blocks", "_scales"  # suffixes of MXFP4's tensors
_BIAS = 127  # of MXFP4's exponents
_PART = r"\.experts\.(\d+)\.(gate|up|down)_proj\.weight"
# Experts that transformers does not join itself: tensors of gates and ups, and of downs.
_JOINED = (
    (
        re.compile(rf"(.+\.block_sparse_moe){_PART}"),
        ("{}.input_linear.weight", "{}.output_linear.weight"),
    ),
    (
        re.compile(rf"(.+\.layers\.\d+){_PART}"),
        ("{}.experts.gate_up_proj", "{}.experts.down_proj"),
    ),
)


@dataclass(frozen=True, slots=True)
class Dense:
    """A float tensor that is dequantized when it is written."""

    shape: tuple[int, ...]
    load: Callable[[], F32]


@dataclass(frozen=True, slots=True)
class Fp4Stack:
    """An MXFP4 tensor of experts [E, in, out]."""

    name: str
    scales: str  # the name of its scales
    dense: Dense


def fp4_stack(weights: Weights, blocks: str, shape: tuple[int, ...]) -> Fp4Stack:
    """The floats of MXFP4 experts.

    Args:
        weights: of the language model.
        blocks: the name of the codes' tensor.
        shape: its own, [E, out, in / 32, 16].
    """
    name = blocks.removesuffix(BLOCKS)
    experts, out, count, half = shape
    codes = weights.array(blocks, shape, "U8")
    exponents = weights.array(f"{name}{_SCALES}", shape[:-1], "U8")

    def load() -> F32:
        both = codes()
        nibbles = np.stack([both & 15, both >> 4], -1).reshape(experts, out, count, 2 * half)
        values = np.array([*E2M1, *(-value for value in E2M1)], np.float32)[nibbles]
        steps = np.ldexp(np.float32(1), exponents().astype(np.int32) - _BIAS)
        floats = (values * steps[..., None]).reshape(experts, out, -1)
        return np.ascontiguousarray(floats.transpose(0, 2, 1))

    dense = Dense((experts, count * 2 * half, out), load)
    return Fp4Stack(name, f"{name}{_SCALES}", dense)


def joined(dense: Mapping[str, Dense]) -> dict[str, Dense]:
    """Join experts of Granite and Gemma, which are quantized separately; others unchanged."""
    found: dict[str, Dense] = {}
    apart: dict[tuple[str, str], dict[tuple[str, int], Dense]] = {}
    for name, each in dense.items():
        for pattern, (inner, down) in _JOINED:
            if part := pattern.fullmatch(name):
                names = inner.format(part[1]), down.format(part[1])
                apart.setdefault(names, {})[part[3], int(part[2])] = each
                break
        else:
            found[name] = each
    for (inner, down), parts in apart.items():
        found[inner] = _stack(parts, ("gate", "up"))
        found[down] = _stack(parts, ("down",))
    return found


def _stack(parts: Mapping[tuple[str, int], Dense], kinds: tuple[str, ...]) -> Dense:
    """[E, rows of all kinds, in]."""
    experts = len({expert for _, expert in parts})
    rows, width = parts[kinds[0], 0].shape
    return Dense((experts, len(kinds) * rows, width), partial(_load, parts, kinds, experts))


def _load(parts: Mapping[tuple[str, int], Dense], kinds: tuple[str, ...], experts: int) -> F32:
    each = (np.concatenate([parts[kind, at].load() for kind in kinds]) for at in range(experts))
    return np.stack(list(each))
