"""Estimated sizes of an engine before compilation.

Weights keep their stored type, floats get the activations' type. The constants were measured with
TensorRT-RTX 1.7 (`python benchmarks/export.py tensorrt`). Full TensorRT takes more: its copies of
the weights are from reports (TensorRT-Edge-LLM issues 30 and 105), not measured.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import onnx_ir as ir

from edgellm.build.lowering.embeddings import table_of
from edgellm.build.lowering.experts import ExpertLayer
from edgellm.build.lowering.linears.weights import LinearWeight, linear_layers
from edgellm.build.plan import Estimate
from edgellm.build.tensorrt.lowering.int4_blocks import layout_of, notes_of_blocks
from edgellm.build.tensorrt.lowering.kernel_attention import Kernels
from edgellm.build.tensorrt.lowering.kernel_experts import expert_bytes
from edgellm.build.tensorrt.lowering.kernel_vocabulary import by_address, constant_linears
from edgellm.build.tensorrt.lowering.linears import is_widened
from edgellm.build.tensorrt.lowering.operators.expert_weights import plan_bytes
from edgellm.build.tensorrt.lowering.precision_fallback import BLOCK_SIZE, INT4, is_lacking
from edgellm.build.tensorrt.options import TensorRtOptions
from edgellm.core import graph_io
from edgellm.device_runtime.runners.tensorrt.library.trt_import import Library

_BITS = {"int4": 4, "int8": 8, "fp8": 8, "fp4": 4}
_COMPILER_BYTES = 330 << 20  # interpreter, compilation of kernels, 200 MB to write the engine
_LAYER_BYTES = 2 << 20  # of the compiler's own graphs, for each attention
_COPIES_OF_4_BITS = 1.3  # more than one: these are repacked
_COPIES_OF_EXPERTS = 1.5  # in a plan, measured with 128 experts of a layer in INT4 and float16
_KERNEL_BYTES = 3 << 20  # kernels of a pass, alike in all layers
_COPIES = 3  # of the weights in full TensorRT, whose reports name 3 to 4
_PARSED_COPIES = 4  # if the parser reads the file and holds a copy, too
_LARGER_BOARD = (
    "build on a machine with more memory, the same TensorRT and a GPU of the same compute "
    "capability (an AGX Orin for an Orin Nano)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the passes that an engine is compiled for."""

    passes: int
    rows: int  # of the longest
    kv_bytes: int = 0
    capacity: int = 0  # rows of the cache
    device_bytes: int = 0  # memory of the GPU, 0 if it is not here
    fallback: str = ""  # precision of weights whose kind is `lacking`
    lacking: frozenset[str] = frozenset()
    full: FullCompiler | None = None  # None: TensorRT-RTX
    kernels: Kernels | None = None  # edgellm's; None: all weights are constants of the plan
    is_stripped: bool = False  # whether weights are in a file next to the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class FullCompiler:
    """Full TensorRT, as far as the memory of a build depends on it."""

    maps_weights: bool  # its parser takes their addresses
    workspace_bytes: int = 0  # the limit of its scratch memory; 0: no limit

    @classmethod
    def of(cls, library: Library, options: TensorRtOptions) -> FullCompiler | None:
        """A library with a build's options; None of TensorRT-RTX."""
        if library.is_ahead_of_time:
            return None
        return cls(maps_weights=library.maps_weights, workspace_bytes=options.workspace_mib << 20)

    @property
    def remedy(self) -> str:
        """What to do if a build needs too much memory."""
        if self.workspace_bytes:
            return f"{_LARGER_BOARD}, or give a smaller --workspace"
        return (
            f"{_LARGER_BOARD}, and limit TensorRT's scratch memory, which has no limit now, "
            "with --workspace 256"
        )


def estimate_graphs(models: list[ir.Model], dtype: ir.DataType, sizes: Sizes) -> Estimate:
    """Predict an engine of several portable graphs, each compiled for all passes."""
    engine = peak = decode = scratch = 0
    notes: list[str] = []
    for model in models:
        own = by_address(model.graph, sizes.kernels if _has_cache(model) else None)
        linears = _linear_bytes(constant_linears(model.graph, own), dtype, sizes)
        tables = _table_bytes(model, dtype, {each.node for each in own})
        weights = sum({**tables, **linears}.values())  # a tied head is in both
        addressed = {each.part.parameter: each.num_bytes for each in own}
        attentions = sum(node.op_type == "Attention" for node in model.graph)
        layers = ExpertLayer.all_of(model.graph)
        experts = [
            (layer, expert_bytes(layer) if sizes.kernels else plan_bytes(layer, dtype))
            for layer in layers
        ]
        all_experts = sum(size for _, size in experts)
        engine += weights + _KERNEL_BYTES * sizes.passes + all_experts + sum(addressed.values())
        working = _weight_copies(model, weights, sizes.full)
        working += 0 if sizes.kernels else int(_COPIES_OF_EXPERTS * all_experts)
        peak = max(peak, working + _COMPILER_BYTES + _LAYER_BYTES * attentions)
        decode += sum(linears.values()) + sum(each.num_bytes for each in own if each.is_head)
        decode += sum(size * layer.top_k // layer.count for layer, size in experts)
        scratch = max(scratch, _scratch_bytes(model, dtype, sizes))
        notes += notes_of_blocks(weight for _, weight in constant_linears(model.graph, own))
    return Estimate(
        engine_bytes=engine,
        kv_bytes=sizes.kv_bytes,
        peak_build_bytes=peak,
        decode_bytes=decode,
        runs_on_cpu=False,
        scratch_bytes=scratch,
        device_bytes=sizes.device_bytes,
        notes=(*notes, *_notes_of_strip(engine, len(models), sizes)),
        build_remedy=sizes.full.remedy if sizes.full else "",
    )


def _notes_of_strip(engine: int, plans: int, sizes: Sizes) -> tuple[str, ...]:
    """Where the bytes of an engine are whose plans have no weights; else ()."""
    if not sizes.is_stripped:
        return ()
    kernels = _KERNEL_BYTES * sizes.passes * plans
    return (
        f"{(engine - kernels) / 1e6:.1f} MB are in files next to the plan, which has about "
        f"{kernels / 1e6:.1f} MB and is given its weights when it is loaded",
    )


def _weight_copies(model: ir.Model, weights: int, full: FullCompiler | None) -> int:
    """Bytes of a compiler's copies of the weights, and of its scratch memory."""
    if full is None:
        return weights + int(_COPIES_OF_4_BITS * _bytes_of_4_bits(model))
    copies = _COPIES if full.maps_weights else _PARSED_COPIES
    return copies * weights + full.workspace_bytes


def _scratch_bytes(model: ir.Model, dtype: ir.DataType, sizes: Sizes) -> int:
    """Bytes of the longest pass: mask, three tensors of the widest layer, four of the narrowest.

    And two of the pairs of rows and experts; where all experts compute, three of these and the
    decoded weights of a layer. The head, the last layer, computes few rows.
    """
    weights = [weight for _, weight in linear_layers(model.graph)]
    shapes = [part.shape for weight in weights[:-1] for part in weight.parts]
    if not shapes:
        return 0
    widest, hidden = max(map(max, shapes)), min(width for width, _ in shapes)
    layers = ExpertLayer.all_of(model.graph)
    pairs = max((each.top_k * sum(each.down.shape[1:]) for each in layers), default=0)
    decoded = 0
    if layers and not sizes.kernels:
        pairs = max(3 * each.count * each.down.shape[1] for each in layers)
        stacks = (stack for each in layers for stack in each.stacks if stack.kind != "dense")
        decoded = 3 * max((math.prod(stack.shape) for stack in stacks), default=0)
    return int(dtype.itemsize * decoded) + int(
        sizes.rows * (sizes.capacity + 3 * widest + 4 * hidden + pairs) * dtype.itemsize
    )


def _has_cache(model: ir.Model) -> bool:
    """Whether a portable graph has a KV cache, as those with edgellm's kernels."""
    return any(str(value.name).startswith(graph_io.PAST) for value in model.graph.inputs)


def _linear_bytes(
    layers: Iterable[tuple[ir.Node, LinearWeight]], dtype: ir.DataType, sizes: Sizes
) -> dict[str, int]:
    """Bytes of each linear weight by its parameter's name."""
    found = {}
    for node, weight in layers:
        part = weight.parts[0]
        falls = bool(sizes.fallback) and is_lacking(weight, sizes.lacking)
        if falls and sizes.fallback == INT4 and weight.in_features % BLOCK_SIZE == 0:
            found[str(node.name)] = weight.count // 2 + weight.count // BLOCK_SIZE * dtype.itemsize
            continue
        if falls or is_widened(weight):
            found[part.parameter] = weight.count * dtype.itemsize
            continue
        found[str(node.name)] = _stored_bytes(weight, int(dtype.itemsize))
    return {name: int(size) for name, size in found.items()}


def _stored_bytes(weight: LinearWeight, float_bytes: int) -> int:
    """Bytes of codes, scales, and the factors of sums for zero points."""
    part, layout = weight.parts[0], layout_of(weight)
    blocks = weight.count // (part.block_size or part.shape[0])
    sums = blocks * float_bytes if part.is_unsigned or (layout and layout.splits) else 0
    if layout is not None:
        codes = weight.count * layout.codes_each
        return codes // 2 + codes // layout.block_size * float_bytes + sums
    scale = 1 if part.kind == "fp4" else float_bytes
    return weight.count * _BITS[part.kind] // 8 + blocks * scale + sums


def _bytes_of_4_bits(model: ir.Model) -> int:
    weights = [weight for _, weight in linear_layers(model.graph)]
    layouts = (layout_of(weight) for weight in weights)
    of_int4 = (
        weight.count * layout.codes_each
        for weight, layout in zip(weights, layouts, strict=True)
        if layout is not None
    )
    return (sum(of_int4) + sum(each.count for each in weights if each.kind == "fp4")) // 2


def _table_bytes(model: ir.Model, dtype: ir.DataType, own: Collection[ir.Node]) -> dict[str, int]:
    """Bytes of each embedding by its parameter's name, but of the lookups `own`."""
    found = {}
    for node in model.graph:
        table = None if node in own else table_of(node)
        if table is not None and len(table[1].shape) == 2:
            dims = tuple(table[1].shape.numpy())
            found[table[0]] = int(math.prod(dims) * dtype.itemsize)
    return found
