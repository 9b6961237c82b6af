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
STORE_ROWS, ATTEND, FINISH = "store_rows", "attend", "finish"
# The one attribute of a node, JSON. `tensorrt.plugin` cannot read numbers with NumPy 2.4 or newer.
GIVEN = "given"
# Rows of partial sums: few queries share the context among as many programs as fit. Prompts have
# no partial sums.
PARTIAL_ROWS, MAX_SHARES = catalog.PROMPT_TOKENS, 16
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


def _of_queries(_op: Any, of: Shapes, _given: Given) -> tuple[tuple[str, tuple[Size, ...]], ...]:
    return (("float16", tuple(of["q"])),)


def _store(_op: Any, of: Shapes, given: Given) -> Launch:
    heads, kv_heads = given["heads"], given["kv_heads"]
    return Launch(
        catalog.store_rows(given["head_dim"], given["codes"], many="sequences" in given),
        (of["q"][1], heads + kv_heads, 1),
        (given["layer"], heads, kv_heads, given["own_tables"], given["head_dim"]),
    )


def _shares(op: Any, rows: Size) -> Size:
    """Programs that share the context of a query."""
    return op.min(op.max(rows, PARTIAL_ROWS) // rows, MAX_SHARES)


def _partial(_op: Any, _of: Shapes, given: Given) -> tuple[tuple[str, tuple[Size, ...]], ...]:
    """Sums, and of each the largest score and the weight, with room for all shares of the rows."""
    heads, size = given["heads"], given["head_dim"]
    return (
        ("float32", (PARTIAL_ROWS, heads, size)),
        ("float32", (PARTIAL_ROWS, heads, 2)),
    )


def _attend(op: Any, of: Shapes, given: Given) -> Launch:
    return Launch(
        catalog.attend(given["head_dim"], given["codes"]),
        (given["kv_heads"], _tiles(catalog.attend_tiles, op, of, given), _shares(op, of["q"][1])),
        _sizes(of, given),
    )


def _tiles(tiles: Callable[[Any, Size, int], Size], op: Any, of: Shapes, given: Given) -> Size:
    """Tiles of a kernel; each sequence of a batch may have one that is not full."""
    count = tiles(op, of["q"][1], given["heads"] // given["kv_heads"])
    return count + given.get("sequences", 0)


def _sizes(of: Shapes, given: Given) -> tuple[Size, ...]:
    """The arguments that `attend` and `finish` share."""
    group = given["heads"] // given["kv_heads"]
    rules = given["window"], given["cap_bits"], given.get("sequences", 0)
    return (given["layer"], of["q"][1], of["tree"][1], group, *rules, given["head_dim"])


def _finish(op: Any, of: Shapes, given: Given) -> Launch:
    variant = catalog.finish(given["head_dim"], given["codes"])
    parts = int(variant.constants["D"]) // int(variant.constants["OUT"])
    return Launch(
        variant,
        (given["kv_heads"], _tiles(catalog.finish_tiles, op, of, given), parts),
        (*_sizes(of, given), _shares(op, of["q"][1]), given["sunk"]),
    )


PLUGINS = (
    Plugin(
        name=STORE_ROWS,
        inputs=("q", "k", "v", "cos", "sin", "positions", "write_index", "table"),
        num_outputs=1,
        outputs=_of_queries,
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
        name=FINISH,
        inputs=("q", "tree", "positions", "write_index", "table", "parts", "stats", "sinks"),
        num_outputs=1,
        outputs=_of_queries,
        launch=_finish,
    ),
)
