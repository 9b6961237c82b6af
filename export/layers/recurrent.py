"""Recurrent layers: their states, and the updates by accepted tokens.

A pass does not change the states; it outputs the recurrence's inputs of its tokens. A second graph,
without weights, computes the next states from those of accepted tokens. So prompts, single tokens
and trees have one form: parents define the ancestors of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from edgellm.core import graph_io, onnx_functions
from edgellm.core.model_spec import RecurrentSpec
from edgellm.export.onnx.builder import Op
from edgellm.export.onnx.functions.attention import call, local_function
from edgellm.export.onnx.functions.delta_rule import delta_update

Parts = Mapping[str, ir.Value]
_END = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """States of a layer."""

    layer: int
    states: dict[str, ir.Value]  # by part, inputs of the decoder
    rows: dict[str, ir.Value]  # by part, outputs of the decoder, [1, S, numbers]
    advance: Callable[[Op, Parts, Parts], Parts]  # records the states after accepted rows


@dataclass(slots=True)
class Recurrences:
    """Recurrent states of a pass."""

    op: Op
    parents: ir.Value  # int64 [S], see `graph_io.PARENT_ROWS`
    layers: list[Recurrence] = field(default_factory=list)

    def state(
        self, layer: int, part: str, shape: tuple[int, ...], dtype: ir.DataType | None = None
    ) -> ir.Value:
        """The state of a layer; default type: activations."""
        return ir.Value(
            name=graph_io.state_name(layer, part),
            shape=ir.Shape(shape),
            type=ir.TensorType(dtype or self.op.dtype),
        )

    def keep(self, recurrence: Recurrence, widths: Mapping[str, int], rows: str) -> None:
        """Add a layer's recurrence; `rows` is the symbol of the number of tokens.

        Its values by token become outputs, with their own type or that of activations.
        """
        for part, value in recurrence.rows.items():
            value.name = graph_io.state_rows_name(recurrence.layer, part)
            value.type = value.type or ir.TensorType(self.op.dtype)
            value.shape = ir.Shape([1, rows, widths[part]])
        self.layers.append(recurrence)

    @property
    def inputs(self) -> list[ir.Value]:
        """Inputs of the decoder, besides `parents`."""
        return [value for layer in self.layers for value in layer.states.values()]

    @property
    def outputs(self) -> list[ir.Value]:
        """Outputs of the decoder."""
        return [value for layer in self.layers for value in layer.rows.values()]

    @property
    def spec(self) -> RecurrentSpec:
        """The spec for the manifest."""
        return RecurrentSpec(
            {str(value.name): tuple(value.shape.numpy()) for value in self.inputs},  # type: ignore[union-attr]
            {str(value.name): int(value.shape[2]) for value in self.outputs},  # type: ignore[index, arg-type]
        )


def convolve(
    recurrences: Recurrences, layer: int, x: ir.Value, weight: ir.Value, size: int, rows: str
) -> ir.Value:
    """A causal depthwise convolution over a token and its ancestors.

    Args:
        recurrences: of the pass.
        layer: of the window.
        x: [1, S, W].
        weight: [W, 1, `size`], the last for the token itself.
        size: kernel size.
        rows: the symbol of S.

    Returns:
        [1, S, W].
    """
    op, width = recurrences.op, _width(weight)
    window = recurrences.state(layer, "window", (1, size - 1, width))
    y = call(op, convolution(size), x, window, weight, recurrences.parents)
    found = Recurrence(layer=layer, states={"window": window}, rows={"window": x}, advance=_shift)
    recurrences.keep(found, {"window": width}, rows)
    return y


def keep_matrix(
    recurrences: Recurrences,
    layer: int,
    matrix: ir.Value,
    given: tuple[ir.Value, ir.Value, ir.Value],
    *,
    key_heads: int,
    decays: int = 1,
    rows: str,
) -> None:
    """Add the matrices [1, H, dk, dv] of a layer's heads, see `delta_rule.delta_update`.

    Args:
        recurrences: of the pass.
        layer: of the matrices.
        matrix: the state.
        given: keys [1, S, J * dk], deltas [1, S, H * dv], logarithms of decays [1, S, H * C], C
            as in `delta_rule`; float32.
        key_heads: J.
        decays: C.
        rows: the symbol of S.
    """
    shape = matrix.shape
    assert shape is not None
    _, heads, keys, values = shape.numpy()
    found: dict[str, ir.Value] = dict(zip(("key", "delta", "decay"), given, strict=True))
    for value in given:
        value.type = ir.TensorType(ir.DataType.FLOAT)
    widths = {"key": key_heads * keys, "delta": heads * values, "decay": heads * decays}
    recurrences.keep(
        Recurrence(layer=layer, states={"matrix": matrix}, rows=found, advance=_advance),
        widths,
        rows,
    )


def _advance(op: Op, states: Parts, rows: Parts) -> Parts:
    given = states["matrix"], rows["key"], rows["delta"], rows["decay"]
    return {"matrix": call(op, delta_update(), *given)}


def floats(op: Op, x: ir.Value) -> ir.Value:
    """X in float32, the type of recurrences."""
    return x if op.dtype == ir.DataType.FLOAT else op.Cast(x, to=int(ir.DataType.FLOAT))


def _width(weight: ir.Value) -> int:
    assert weight.shape is not None
    return int(weight.shape[0])  # type: ignore[arg-type]


def _shift(op: Op, states: Parts, rows: Parts) -> Parts:
    """Keep the newest tokens in the window."""
    window = states["window"]
    assert window.shape is not None
    size = int(window.shape[1])  # type: ignore[arg-type]
    joined = op.Concat(window, rows["window"], axis=1)
    ends = (op.constant([each]) for each in (-size, _END, 1))
    return {"window": op.Slice(joined, *ends)}


def convolution(size: int) -> ir.Function:
    """Y of `convolve` from x [1, S, W], window [1, size - 1, W], weight [W, 1, size], parents [S].

    Sums run from the newest token to the oldest, independent of other tokens in the pass.
    """

    def body(
        op: Op, x: ir.Value, window: ir.Value, weight: ir.Value, parents: ir.Value
    ) -> ir.Value:
        window_size = op.Constant(value_int=size - 1)
        rows = op.Concat(window, x, axis=1)  # the window's rows are their next one's parents
        before = op.Constant(value_ints=[max(at - 1, 0) for at in range(size - 1)])
        shifted = op.Add(parents, window_size)
        parent_of = op.Concat(before, shifted, axis=0)
        taps = op.outputs(
            size, "Split", op.Transpose(weight, perm=[2, 1, 0]), axis=0, num_outputs=size
        )
        y, places = op.Mul(x, taps[-1]), shifted
        for tap in taps[-2::-1]:
            y = op.Add(y, op.Mul(op.Gather(rows, places, axis=1), tap))
            places = op.Gather(parent_of, places)
        return y

    return local_function(f"{onnx_functions.CONVOLUTION}{size}", "x window weight parents", body)
