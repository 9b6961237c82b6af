"""The nodes of attention by edgellm's kernels: what each gives, and how its kernel is launched.

Plugins pass this to TensorRT: quick ones while it builds (`build/tensorrt/plugins.py`), those
in Python also at run time (`python_plugins.py`). Sizes are numbers or a library's
expressions. Where types alone are asked for they are dummies, and only what begins with a size of
an input stays an expression: the `tensorrt.plugin` of 10.13 takes a number in front for an
expression of another plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm.device_runtime.kernels.triton import catalog
from edgellm.device_runtime.kernels.triton.catalog import Variant

NAMESPACE = "edgellm"  # of the plugins
STORE_ROWS, ATTEND, COMBINE = "store_rows", "attend", "combine"
# The one attribute of a node, JSON. `tensorrt.plugin` cannot read numbers with NumPy 2.4 or newer.
GIVEN = "given"
# Rows of partial sums at least: few queries share the context among as many programs as fit. So
# the memory for sums grows with the rows of a pass and never shrinks.
PARTIAL_ROWS, MOST_SHARES = 128, 16
Size = Any  # an int, or an expression of `tensorrt.plugin`
Shapes = Mapping[str, Sequence[Size]]  # of the inputs, by name
Given = Mapping[str, Any]  # what the node says of its layer


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel is launched: block sizes are the variant's own."""

    variant: Variant
    grid: tuple[Size, Size, Size]
    sizes: tuple[Size, ...]  # int32 arguments, between inputs and outputs


@dataclass(frozen=True, slots=True, kw_only=True)
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
    return Launch(
        catalog.store_rows(given["head_dim"], given["codes"], many="sequences" in given),
        (of["q"][1], heads + kv_heads, 1),
        (given["layer"], heads, kv_heads, given["own_tables"], given["head_dim"]),
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
    group, size = given["heads"] // kv_heads, given["head_dim"]
    window, cap = given["window"], given["cap_bits"]
    variant = catalog.attend(
        size,
        given["codes"],
        windowed=bool(window),
        capped=bool(cap),
        many="sequences" in given,
    )
    blocks = catalog.attend_tiles(op, variant, rows, group)
    if "sequences" in given:
        blocks = blocks + given["sequences"]  # of which each may have a block that is not full
    return Launch(
        variant,
        (kv_heads, blocks, _shares(op, rows)),
        (given["layer"], rows, of["tree"][1], group, window, cap, size),
    )


def _joined(_op: Any, of: Shapes, given: Given) -> tuple[tuple[str, tuple[Size, ...]], ...]:
    return (("float16", (1, of["stats"][0], given["heads"] * given["head_dim"])),)


def _combine(op: Any, of: Shapes, given: Given) -> Launch:
    rows, heads, size = of["stats"][0], given["heads"], given["head_dim"]
    variant = catalog.combine(size, sunk=bool(given["sunk"]))
    return Launch(variant, (rows * heads, 1, 1), (rows * heads, heads, _shares(op, rows), size))


PLUGINS = (
    Plugin(
        name=STORE_ROWS,
        inputs=("q", "k", "v", "cos", "sin", "positions", "write_index", "table"),
        num_outputs=1,
        outputs=_rotated,
        launch=_store,
    ),
    Plugin(
        name=ATTEND,
        inputs=("q", "tree", "positions", "write_index", "table"),
        num_outputs=2,
        outputs=_partial,
        launch=_attend,
    ),
    Plugin(
        name=COMBINE,
        inputs=("parts", "stats", "sinks"),
        num_outputs=1,
        outputs=_joined,
        launch=_combine,
    ),
)
