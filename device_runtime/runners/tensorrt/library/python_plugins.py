"""Edgellm's kernels as plugins in Python, for a TensorRT before 10.9: it takes none that bring one.

A plan then names its plugins, which must be registered before it is loaded: `llm_build` and the
runtime do. A kernel's PTX is loaded when a node is configured for a build, or attached to a context
of an engine. When a pass runs, TensorRT calls `enqueue`, which only launches: a graph may be
recorded, in a build too. Interfaces as the docstrings of the bindings of 10.3 say.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.device_runtime.kernels.triton import prebuilt
from edgellm.device_runtime.runners.tensorrt.cuda.launch import DriverKernels, Launch
from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import (
    GIVEN,
    NAMESPACE,
    Plugin,
    Shapes,
)
from edgellm.device_runtime.runners.tensorrt.library.kernel_nodes import PLUGINS
from edgellm.device_runtime.runners.tensorrt.library.trt_import import require_attributes

_VERSION = "1"  # as nodes name it
_NO_DATA = np.zeros(0, np.int8)
_NUMBERS = SimpleNamespace(max=max, min=min, cdiv=lambda a, b: -(-a // b))
_find = functools.cache(prebuilt.find)
_registered: list[Any] = []  # creators, of which TensorRT keeps addresses
Load = Callable[[prebuilt.Compiled], Launch]


@dataclass(frozen=True, slots=True)
class _Kind:
    """A plugin in a library, and what loads its kernel."""

    trt: Any
    plugin: Plugin
    load: Load

    def fields(self, data: NDArray[np.int8]) -> Any:
        """A node's attribute. TensorRT keeps the address of `data`, which must outlive it."""
        field = self.trt.PluginField(GIVEN, data, self.trt.PluginFieldType.CHAR)
        return self.trt.PluginFieldCollection([field])


def register(trt: Any, load: Load | None = None) -> None:
    """Make the plugins known to TensorRT, once.

    Args:
        trt: the module `tensorrt`.
        load: what loads a kernel (default: the NVIDIA driver).

    Raises:
        EdgeLLMError: see `require_attributes`.
    """
    require_attributes(trt)
    registry = trt.get_plugin_registry()
    load = load or DriverKernels().load
    for plugin in PLUGINS:
        if registry.get_creator(plugin.name, _VERSION, NAMESPACE) is None:
            creator = _creator(_Kind(trt, plugin, load))
            registry.register_creator(creator, NAMESPACE)
            _registered.append(creator)


def _creator(kind: _Kind) -> Any:
    """What makes nodes, of a graph's attribute or of a plan's."""
    trt = kind.trt
    bases = trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime

    class Node(_Node, *bases):
        def __init__(self, text: str) -> None:
            for base in bases:
                base.__init__(self)
            _Node.__init__(self, kind, text)

    class Creator(trt.IPluginCreatorV3One):
        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version = kind.plugin.name, _VERSION
            self.plugin_namespace, self.field_names = NAMESPACE, kind.fields(_NO_DATA)

        def create_plugin(self, _name: str, fields: Any, _phase: Any) -> Any:
            (text,) = (bytes(field.data) for field in fields if field.name == GIVEN)
            return Node(text.decode())

    return Creator()


class _Node:
    """What TensorRT asks a node; its own classes are bases of those that are made of this one."""

    def __init__(self, kind: _Kind, text: str) -> None:
        self.plugin_name = self.plugin_type = kind.plugin.name
        self.plugin_version, self.plugin_namespace = _VERSION, NAMESPACE
        self.num_outputs = kind.plugin.num_outputs
        self._kind, self._text, self._given = kind, text, json.loads(text)
        self._data = np.frombuffer(text.encode(), np.int8)  # the fields have its address only
        self._fields = kind.fields(self._data)
        self._launch: Launch | None = None

    def get_capability_interface(self, _kind: Any) -> Any:
        return self

    def clone(self) -> Any:
        # The classes made of this one know their kind.
        copied = type(self)(self._text)  # type: ignore[call-arg]
        copied._launch = self._launch
        return copied

    def attach_to_context(self, _context: Any) -> Any:
        attached = self.clone()
        attached._load()
        return attached

    def _load(self) -> None:
        """Load the kernel, before TensorRT may record a CUDA graph."""
        variant = self._kind.plugin.launch(_NUMBERS, self._dummies(), self._given).variant
        self._launch = self._kind.load(_find(variant, self._given["capability"]))

    def get_fields_to_serialize(self) -> Any:
        return self._fields

    def _dummies(self) -> Shapes:
        """Shapes of the inputs, where types or the kernel alone are asked for."""
        return dict.fromkeys(self._kind.plugin.inputs, (1, 1, 1))

    def get_output_data_types(self, _types: Sequence[Any]) -> list[Any]:
        found = self._kind.plugin.outputs(_NUMBERS, self._dummies(), self._given)
        return [getattr(self._kind.trt, dtype) for dtype, _ in found]

    def get_output_shapes(self, inputs: Sequence[Any], _sizes: Any, builder: Any) -> list[Any]:
        trt, plugin = self._kind.trt, self._kind.plugin
        expressions = _Expressions(trt, builder)
        found = plugin.outputs(expressions, _named(plugin, inputs), self._given)
        return [trt.DimsExprs([expressions.of(dim) for dim in dims]) for _, dims in found]

    def supports_format_combination(self, place: int, tensors: Any, count: int) -> bool:
        found, kinds = tensors[place].desc, self.get_output_data_types(())
        fits = place < count or found.type == kinds[place - count]
        return fits and found.format == self._kind.trt.TensorFormat.LINEAR

    def configure_plugin(self, _inputs: Any, _outputs: Any) -> None:
        self._load()

    def on_shape_change(self, _inputs: Any, _outputs: Any) -> None:
        pass

    def get_valid_tactics(self) -> list[int]:
        return []

    def set_tactic(self, _tactic: int) -> None:
        pass

    def get_workspace_size(self, _inputs: Any, _outputs: Any) -> int:
        return 0

    def enqueue(
        self,
        inputs_as: Sequence[Any],
        _outputs_as: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        _workspace: int,
        stream: int,
    ) -> None:
        shapes = _named(self._kind.plugin, [each.dims for each in inputs_as])
        found = self._kind.plugin.launch(_NUMBERS, shapes, self._given)
        assert self._launch is not None, "TensorRT runs nodes that it configured or attached"
        self._launch(found.grid, [*inputs, *found.sizes, *outputs], stream)


def _named(plugin: Plugin, shapes: Sequence[Any]) -> Shapes:
    return {name: tuple(each) for name, each in zip(plugin.inputs, shapes, strict=True)}


class _Expressions:
    """What `Plugin.outputs` computes sizes with, of which TensorRT has expressions."""

    def __init__(self, trt: Any, builder: Any) -> None:
        self._trt, self._builder = trt, builder

    def of(self, size: Any) -> Any:
        """A number as an expression."""
        return self._builder.constant(size) if isinstance(size, int) else size

    def max(self, one: Any, other: Any) -> Any:
        """The larger of two sizes."""
        kind = self._trt.DimensionOperation.MAX
        return self._builder.operation(kind, self.of(one), self.of(other))
