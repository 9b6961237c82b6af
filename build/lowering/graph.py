"""Editor of onnx_ir graphs: inserts nodes, constants and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from edgellm.build.lowering.weights import WeightFile


class GraphEditor:
    """Inserts nodes before a cursor node, which keeps the order topological."""

    def __init__(self, graph: ir.Graph, weights: WeightFile | None = None) -> None:
        """`weights`: None if none are added."""
        self.graph = graph
        self._weights = weights
        self._constants: dict[str, ir.Value] = {}
        self._count = 0
        self.cursor: ir.Node | None = None

    def copy_of(self, model: ir.Model) -> tuple[ir.Model, GraphEditor]:
        """A copy of the model that this edits, and an editor of the copy."""
        copy = model.clone()
        editor = GraphEditor(copy.graph, self._weights)
        editor._count = self._count
        kept = copy.graph.initializers
        editor._constants = {
            name: kept[str(value.name)]
            for name, value in self._constants.items()
            if value.name in kept
        }
        return copy, editor

    def find(self, *op_types: str) -> list[ir.Node]:
        """All nodes of these types, in order."""
        return [node for node in self.graph if node.op_type in op_types]

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        *,
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """A new node with one output, before the cursor."""
        return self.nodes(op_type, inputs, 1, domain=domain, **attributes)[0]

    def nodes(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        count: int,
        *,
        domain: str = "",
        **attributes: Any,
    ) -> Sequence[ir.Value]:
        """A new node with several outputs, before the cursor."""
        node = ir.Node(
            domain,
            op_type,
            inputs,
            ir.convenience.convert_attributes(attributes),
            num_outputs=count,
        )
        self._count += 1
        node.name = f"lowered.{op_type}_{self._count}"
        for index, value in enumerate(node.outputs):
            value.name = f"{node.name}.{index}"
        if self.cursor is None:
            raise ValueError("the cursor is not set")
        self.graph.insert_before(self.cursor, node)
        return node.outputs

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        """A further input of the graph."""
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self.graph.inputs.append(value)
        return value

    def constant(self, name: str, array: np.ndarray | np.generic) -> ir.Value:
        """A small initializer; the same name returns the same value."""
        if name not in self._constants:
            self._constants[name] = self._initializer(
                f"lowered.{name}", ir.tensor(np.asarray(array))
            )
        return self._constants[name]

    def weight(
        self,
        name: str,
        make: Callable[[], np.ndarray],
        dtype: ir.DataType | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> ir.Value:
        """An initializer in the engine's weight file, see `WeightFile.add`."""
        if name in self.graph.initializers:
            return self.graph.initializers[name]
        assert self._weights is not None
        return self._initializer(name, self._weights.add(name, make, dtype, shape))

    def streamed_weight(
        self,
        name: str,
        num_bytes: int,
        make: Callable[[], Iterator[bytes]],
        dtype: ir.DataType = ir.DataType.UINT8,
        shape: tuple[int, ...] | None = None,
    ) -> ir.Value:
        """Bytes [num_bytes] in the engine's weight file, see `WeightFile.stream`."""
        if name in self.graph.initializers:
            return self.graph.initializers[name]
        assert self._weights is not None
        return self._initializer(name, self._weights.stream(name, num_bytes, make, dtype, shape))

    def _initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        value = ir.Value(
            name=name,
            shape=ir.Shape([int(dim) for dim in tensor.shape]),  # type: ignore[arg-type]
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self.graph.register_initializer(value)
        return value

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Replace all uses of `old` by `new`; a graph output keeps its name and index."""
        for position, output in enumerate(self.graph.outputs):
            if output is old:
                new.name, old.name = old.name, f"{old.name}.replaced"
                new.type, new.shape = old.type, old.shape
                self.graph.outputs[position] = new
        for user, index in tuple(old.uses()):
            user.replace_input_with(index, new)
