"""Kernels of each pass, parsed from the compiler's log.

With detailed verbosity TensorRT-RTX prints a line for each kernel, which shows fused attentions and
decoded weights without a GPU or an engine object. TensorRT reports the same for a loaded engine,
see `engine_layers.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_KERNEL = re.compile(
    r"Name: (?P<name>.*?), LayerType: (?P<kind>\w+), Inputs: \[(?P<inputs>|.*?\})\]"
    r"(?:, Constants: \[(?P<constants>|.*?\})\])?, Outputs: \[(?P<outputs>|.*?\})\], \w+:"
)
_TENSOR = re.compile(r"\{ Name: (.*?), [^{]*?Dimensions: \[(.*?)\], [^{]*?Datatype: (\w+)")
NODE = re.compile(r"\[ONNX Layer: (.*?)\]")
PROFILE = re.compile(r"\[profile (\d+)\]")
PART = re.compile(r"_myl(\d+)_")
_FUSED_ATTENTION = re.compile(r"_(gemm|gemv)_mha_|fmha|flash", re.IGNORECASE)
_FLOATS = ("Half", "Float", "BFloat16")
_LOW_BIT = ("Int4", "Int8", "FP8", "FP4E2M1")
NOT_KERNELS = ("shape_call", "ShapeHostToDevice", "Constant", "NoOp", "signal", "wait")
_PRODUCT = re.compile(r"MatMul|Gemm|Conv(?!ert)", re.IGNORECASE)
_ONLY_MOVES = re.compile(r"__myl_(?!.*(Sum|Fc|Mma|Gemm|Dot))")  # by the library's names of fusions


@dataclass(frozen=True, slots=True)
class Tensor:
    """An operand of a kernel."""

    name: str
    dims: tuple[int, ...]  # -1: known at run time
    dtype: str  # in the library's notation, e.g. "Half", "FP8"

    @property
    def count(self) -> int:
        """Number of elements; 0 if unknown."""
        return 0 if -1 in self.dims else math.prod(self.dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A launch in one kind of pass."""

    pass_index: int
    name: str
    kind: str
    inputs: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    nodes: tuple[str, ...]  # of the lowered graph
    tactic: str = ""  # the library's name of the tactic, if printed

    @property
    def is_fused_attention(self) -> bool:
        """Whether scores, softmax and sum are one kernel."""
        return bool(_FUSED_ATTENTION.search(f"{self.name} {self.tactic}"))

    @property
    def is_reformat(self) -> bool:
        """Whether it only copies a tensor into another layout or type."""
        return self.kind == "Reformat" or self.name.startswith("Reformatting CopyNode")

    @property
    def is_plugin(self) -> bool:
        """Whether it is a plugin's kernel."""
        return self.kind.startswith("Plugin")

    @property
    def products(self) -> tuple[str, ...]:
        """Types of its weights, each after the type of rounded inputs.

        A weight has two dimensions or more; scales of its blocks have fewer elements.
        """
        is_product = any(_PRODUCT.search(node) for node in (self.name, *self.nodes))
        if not is_product or self.decodes_weight or _ONLY_MOVES.match(self.name):
            return ()
        matrices = [each for each in self.constants if sum(dim != 1 for dim in each.dims) > 1]
        if not matrices:
            return ()
        dtype = max(matrices, key=lambda each: each.count).dtype
        inputs = {each.dtype for each in self.inputs if each.dtype in _LOW_BIT and each.count != 1}
        shown = f"{min(inputs)} x {dtype}" if dtype in _LOW_BIT and inputs else dtype
        return tuple(shown for each in matrices if each.dtype == dtype)

    @property
    def decodes_weight(self) -> bool:
        """Whether it dequantizes a weight to memory in every pass."""
        weights = [each.count for each in self.constants if each.dtype in _LOW_BIT]
        return bool(weights) and any(
            each.count >= max(weights) and each.dtype in _FLOATS for each in self.outputs
        )


def read_kernels(text: str) -> list[Kernel]:
    """The kernels in a printed list of layers, without those that compute shapes."""
    lines = [line for line in text.splitlines() if _KERNEL.match(line)]
    passes = passes_of_parts(lines)
    return list(_kernels(lines, passes))


def copied_caches(kernels: Sequence[Kernel], pass_index: int, capacity: int, heads: int) -> int:
    """Tensors as long as the cache that a pass writes for all query heads."""
    return sum(
        capacity in each.dims and heads in each.dims[:-1] and -1 not in each.dims
        for kernel in kernels
        if kernel.pass_index == pass_index
        for each in kernel.outputs
    )


def passes_of_parts(lines: Sequence[str]) -> dict[str, int]:
    """The pass of each compiled part; only some of its lines have it."""
    found: dict[str, int] = {}
    for line in lines:
        if part := PART.search(line):
            named = PROFILE.search(line)
            found[part[1]] = max(found.get(part[1], 0), int(named[1]) if named else 0)
    return found


def _kernels(lines: list[str], passes: dict[str, int]) -> Iterator[Kernel]:
    for line in lines:
        match, part = _KERNEL.match(line), PART.search(line)
        assert match is not None
        if match["kind"] not in NOT_KERNELS and part is not None:
            inputs, constants, outputs = (
                _tensors(match[role]) for role in ("inputs", "constants", "outputs")
            )
            nodes = tuple(NODE.findall(line))
            yield Kernel(
                pass_index=passes[part[1]],
                name=match["name"],
                kind=match["kind"],
                inputs=inputs,
                constants=constants,
                outputs=outputs,
                nodes=nodes,
            )


def _tensors(listed: str | None) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(name, tuple(int(dim) for dim in dims.split(",") if dim), dtype)
        for name, dims, dtype in _TENSOR.findall(listed or "")
    )
