"""A recorder of ONNX nodes: `op.MatMul(x, w)` appends a node and returns its output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from edgellm.export.checkpoints.weights import StoredTensor

OPSET = 24
IR_VERSION = 11
CALLED = "called"  # key in a function's `meta` for functions that its body calls


class Op:
    """Records nodes in order under dotted scope names, with their weights."""

    def __init__(self, dtype: ir.DataType) -> None:
        """`dtype` is the activation type of the graph: FLOAT or FLOAT16."""
        self.dtype = dtype
        self.nodes: list[ir.Node] = []
        self.constants: list[ir.Value] = []
        self.parameters: dict[str, tuple[ir.Value, StoredTensor]] = {}
        self.functions: dict[ir.OperatorIdentifier, ir.Function] = {}
        self._scope: list[str] = []
        self._names: dict[str, int] = {}

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of all nodes made in the block."""
        self._scope.append(name)
        yield
        self._scope.pop()

    def __getattr__(self, op_type: str) -> Callable[..., ir.Value]:
        """`op.Type(*inputs, attribute=...)`; None is an omitted input."""
        if not op_type[0].isupper():
            raise AttributeError(op_type)

        def record(
            *inputs: ir.Value | None, name: str | None = None, **attributes: Any
        ) -> ir.Value:
            return self.outputs(1, op_type, *inputs, name=name, **attributes)[0]

        return record

    def outputs(
        self,
        count: int,
        op_type: str,
        *inputs: ir.Value | None,
        name: str | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> tuple[ir.Value, ...]:
        """Append a node of several outputs; `name` is that of the first."""
        while inputs and inputs[-1] is None:  # TensorRT's parser fails for inputs named ""
            inputs = inputs[:-1]
        node = ir.Node(
            domain,
            op_type,
            inputs,
            ir.convenience.convert_attributes(attributes),
            num_outputs=count,
        )
        node.name = self._unique(op_type)
        for index, value in enumerate(node.outputs):
            value.name = f"{node.name}.{index}" if index else name or node.name
        self.nodes.append(node)
        return tuple(node.outputs)

    def constant(self, array: Any, dtype: ir.DataType | None = None) -> ir.Value:
        """A small initializer inside the graph file."""
        tensor = ir.tensor(np.asarray(array, dtype=dtype.numpy() if dtype else None))
        return self._initializer(self._unique("constant"), tensor)

    def parameter(self, stored: StoredTensor) -> ir.Value:
        """A weight in the external data file; the same weight used twice is stored once."""
        if stored.name not in self.parameters:
            value = ir.Value(
                name=stored.name, shape=ir.Shape(stored.shape), type=ir.TensorType(stored.dtype)
            )
            self.parameters[stored.name] = (value, stored)
        return self.parameters[stored.name][0]

    def define(self, function: ir.Function) -> None:
        """A function that nodes of this graph call, after those that its own nodes call.

        A function may be defined several times.
        """
        if function.identifier() not in self.functions:
            for called in function.meta.get(CALLED, ()):
                self.define(called)
            self.functions[function.identifier()] = function

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        """`x` as `dtype`; no node if a parameter has this type already."""
        return x if x.dtype == dtype else self.Cast(x, to=int(dtype))

    def _initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        value = ir.Value(
            name=name,
            shape=ir.Shape(array_shape(tensor)),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self.constants.append(value)
        return value

    def _unique(self, kind: str) -> str:
        name = ".".join([*self._scope, kind])
        count = self._names[name] = self._names.get(name, -1) + 1
        return f"{name}_{count}" if count else name


def array_shape(tensor: ir.TensorProtocol) -> list[int]:
    """The static shape of a constant."""
    return [int(dim) for dim in tensor.shape]  # type: ignore[arg-type]
