"""Edgellm's kernels as quickly deployable plugins: what TensorRT asks of one while it builds.

A plugin says what it gives and how its kernel is launched; the PTX goes into the plan, so that who
runs an engine needs neither this module nor Python. A plugin of `tensorrt.plugin` is two functions
that are known by their signatures; these are made here of a table. Sizes are expressions: where
types alone are asked for they are dummies, and only what begins with a size of an input stays one
(the `tensorrt.plugin` of 10.13 takes a number in front for an expression of another plugin).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import GenericAlias
from typing import Any

from edgellm.build.tensorrt.kernel_attention import (
    ATTEND,
    COMBINE,
    GIVEN,
    NAMESPACE,
    STORE_ROWS,
)
from edgellm.device_runtime.kernels.triton import prebuilt
from edgellm.device_runtime.kernels.triton.catalog import KERNELS, Variant, attend

# Rows of partial sums at least: few queries share the context among as many programs as fit. So
# the memory for sums grows with the rows of a pass and never shrinks.
PARTIAL_ROWS, MOST_SHARES = 128, 16
Size = Any  # an int, or an expression of `tensorrt.plugin`
Shapes = Mapping[str, Sequence[Size]]  # of the inputs, by name
Given = Mapping[str, Any]  # what the node says of its layer, see `kernel_attention.GIVEN`


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel is launched: block sizes are the variant's own."""

    variant: Variant
    grid: tuple[Size, Size, Size]
    sizes: tuple[Size, ...]  # int32 arguments, between inputs and outputs


@dataclass(frozen=True, slots=True)
class Plugin:
    """A node whose kernel is edgellm's."""

    name: str
    inputs: tuple[str, ...]
    num_outputs: int
    outputs: Callable[[Any, Shapes, Given], tuple[tuple[str, tuple[Size, ...]], ...]]
    launch: Callable[[Any, Shapes, Given], Launch]


def _rotated(_op: Any, of: Shapes, _given: Given) -> tuple[tuple[str, tuple[Size, ...]], ...]:
    return (("float16", tuple(of["q"])),)


def _store(_op: Any, of: Shapes, given: Given) -> Launch:
    heads, kv_heads = given["heads"], given["kv_heads"]
    coded = {"D": given["head_dim"], "CODES": given["codes"]}
    return Launch(
        Variant(KERNELS[STORE_ROWS], coded, 1),
        (of["q"][1], heads + kv_heads, 1),
        (given["layer"], heads, kv_heads, given["own_tables"]),
    )


def _partial_rows(op: Any, rows: Size) -> Size:
    return op.max(rows, PARTIAL_ROWS)


def _shares(op: Any, rows: Size) -> Size:
    """Programs that share the context of a query."""
    return op.min(_partial_rows(op, rows) // rows, MOST_SHARES)


def _partial(op: Any, of: Shapes, given: Given) -> tuple[tuple[str, tuple[Size, ...]], ...]:
    """Sums, and of each the largest score and the weight, with room for all shares of the rows."""
    rows, heads = of["q"][1], given["heads"]
    parts = (_partial_rows(op, rows), heads, given["head_dim"])
    return (("float32", parts), ("float32", (rows, MOST_SHARES, heads, 2)))


def _attend(op: Any, of: Shapes, given: Given) -> Launch:
    rows, kv_heads = of["q"][1], given["kv_heads"]
    group = given["heads"] // kv_heads
    variant = attend(
        given["capability"],
        given["head_dim"],
        given["rows"],
        given["codes"],
        windowed=bool(given["window"]),
        capped=bool(given["cap_bits"]),
    )
    return Launch(
        variant,
        (kv_heads, op.cdiv(rows * group, given["rows"]), _shares(op, rows)),
        (given["layer"], rows, of["tree"][1], group, given["window"], given["cap_bits"]),
    )


def _joined(_op: Any, of: Shapes, given: Given) -> tuple[tuple[str, tuple[Size, ...]], ...]:
    return (("float16", (1, of["stats"][0], given["heads"] * given["head_dim"])),)


def _combine(op: Any, of: Shapes, given: Given) -> Launch:
    rows, heads = of["stats"][0], given["heads"]
    variant = Variant(KERNELS[COMBINE], {"D": given["head_dim"], "SUNK": bool(given["sunk"])}, 1)
    return Launch(variant, (rows * heads, 1, 1), (rows * heads, heads, _shares(op, rows)))


PLUGINS = (
    Plugin(
        STORE_ROWS,
        ("q", "k", "v", "cos", "sin", "positions", "write_index", "table"),
        1,
        _rotated,
        _store,
    ),
    Plugin(ATTEND, ("q", "tree", "positions", "write_index", "table"), 2, _partial, _attend),
    Plugin(COMBINE, ("parts", "stats", "sinks"), 1, _joined, _combine),
)


def register(trt: Any, op: Any) -> None:
    """Make the plugins known to TensorRT, once.

    Args:
        trt: the module `tensorrt`.
        op: its module `tensorrt.plugin`.
    """
    known = getattr(op.op, NAMESPACE) if hasattr(op.op, NAMESPACE) else None
    for plugin in PLUGINS:
        if not hasattr(known, plugin.name):
            _register(trt, op, plugin)


def _register(trt: Any, op: Any, plugin: Plugin) -> None:
    name, count = f"{NAMESPACE}::{plugin.name}", len(plugin.inputs)

    def shapes(descriptions: Sequence[Any]) -> Shapes:
        named = zip(plugin.inputs, descriptions, strict=True)
        return {name: tuple(each.shape_expr) for name, each in named}

    def describe(*inputs: Any, **attributes: str) -> Any:
        found = plugin.outputs(op, shapes(inputs), json.loads(attributes[GIVEN]))
        return tuple(
            op.from_shape_expr(tuple(dims), dtype=getattr(trt, dtype)) for dtype, dims in found
        )

    def implement(*arguments: Any) -> Any:
        given = json.loads(arguments[count])
        found = plugin.launch(op, shapes(arguments[:count]), given)
        return _compiled(op, found, given["capability"])

    parameters = {**dict.fromkeys(plugin.inputs, op.TensorDesc), GIVEN: str}
    described = GenericAlias(tuple, (op.TensorDesc,) * plugin.num_outputs)
    _sign(describe, parameters, described)
    text = str | bytes
    launched = GenericAlias(tuple, (text, text, op.KernelLaunchParams, op.SymExprs))
    _sign(implement, {**parameters, "outputs": described, "tactic": int}, launched)
    op.register(name)(describe)
    op.aot_impl(name)(implement)


def _sign(function: Any, parameters: Mapping[str, Any], returned: Any) -> None:
    """Give a function the signature by which `tensorrt.plugin` knows it."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature(
        [inspect.Parameter(name, kind, annotation=each) for name, each in parameters.items()],
        return_annotation=returned,
    )


def _compiled(op: Any, launch: Launch, sm: int) -> tuple[str, bytes, Any, Any]:
    """Kernel, PTX, launch and sizes."""
    compiled = prebuilt.find(launch.variant, sm)
    launched = op.KernelLaunchParams()
    launched.grid_x, launched.grid_y, launched.grid_z = launch.grid
    launched.block_x, launched.shared_mem = compiled.threads, compiled.shared_bytes
    sizes = op.SymIntExprs(len(launch.sizes))
    for index, size in enumerate(launch.sizes):
        sizes[index] = op.SymInt32(size)
    return compiled.entry, compiled.ptx.encode(), launched, sizes
