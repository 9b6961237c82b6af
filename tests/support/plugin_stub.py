"""NVIDIA's own `tensorrt.plugin`, as its wheels of bindings have it, without the library.

The library is not available here; Python files next to the bindings define how it calls
plugins. They run on a module that knows types, dimensions and a registry, no more.
"""

from __future__ import annotations

import enum
import importlib.util
import operator
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

_BASES = (
    "ITensor",
    "IPluginV3",
    "IPluginV3QuickCore",
    "IPluginV3QuickBuild",
    "IPluginV3QuickAOTBuild",
    "IPluginV3QuickRuntime",
    "IPluginCreatorV3Quick",
    "IPluginV3OneCore",
    "IPluginV3OneBuild",
    "IPluginV3OneRuntime",
    "IPluginCreatorV3One",
    "ISymExpr",
)
_TYPES = (
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "int32",
    "int64",
    "bool",
    "uint8",
    "fp8",
    "int4",
)
_OPERATIONS = {
    "SUM": operator.add,
    "PROD": operator.mul,
    "SUB": operator.sub,
    "MAX": max,
    "MIN": min,
    "FLOOR_DIV": operator.floordiv,
    "CEIL_DIV": lambda a, b: -(-a // b),
    "EQUAL": lambda a, b: int(a == b),
    "LESS": lambda a, b: int(a < b),
}


class Dim:
    """A size: a number, or what becomes one when the sizes of inputs are known."""

    def __init__(self, of: Any, *, is_known: bool = False) -> None:
        self.of, self._is_known = of, is_known

    def is_constant(self) -> bool:
        return self._is_known

    def get_constant_value(self) -> int:
        assert self._is_known
        return self.of({})

    def is_size_tensor(self) -> bool:
        return False


def dim(value: int | str) -> Dim:
    """Return a size: a number, or a symbol."""
    if isinstance(value, str):
        return Dim(lambda sizes: sizes[value])
    return Dim(lambda _: value, is_known=True)


class Builder:
    def constant(self, value: int) -> Dim:
        return dim(value)

    def operation(self, operation: Any, one: Dim, other: Dim) -> Dim:
        compute, both = _OPERATIONS[operation.name], one.is_constant() and other.is_constant()
        return Dim(lambda sizes: compute(one.of(sizes), other.of(sizes)), is_known=both)


class _Registry:
    def __init__(self) -> None:
        self.creators: dict[tuple[str, str], Any] = {}

    def register_creator(self, creator: Any, namespace: str) -> bool:
        self.creators[namespace, creator.name] = creator
        return True

    def get_creator(self, name: str, _version: str, namespace: str) -> Any:
        return self.creators.get((namespace, name))


def library(*, repeats: bool = False) -> ModuleType:
    """What bindings have, without the library after them.

    Args:
        repeats: fields repeat their first byte, as before 10.16 under NumPy 2.
    """
    trt: Any = ModuleType("tensorrt")
    for name in _BASES:
        setattr(trt, name, _base(name))
    trt.Dim = trt.IDimensionExpr = Dim
    trt.IExprBuilder = Builder
    trt.DataType = enum.Enum("DataType", [each.upper() for each in _TYPES])
    for name in _TYPES:
        setattr(trt, name, trt.DataType[name.upper()])
    trt.DimensionOperation = enum.Enum("DimensionOperation", list(_OPERATIONS))
    layouts = "LINEAR CHW2 HWC8 CHW4 CHW16 CHW32 DHWC8 CDHW32 HWC DLA_LINEAR DLA_HWC4 HWC16 DHWC"
    trt.TensorFormat = enum.Enum("TensorFormat", layouts)
    requests = "UNKNOWN PREFER_JIT PREFER_AOT STRICT_JIT STRICT_AOT"
    trt.QuickPluginCreationRequest = enum.Enum("QuickPluginCreationRequest", requests)
    trt.TensorRTPhase = enum.Enum("TensorRTPhase", "BUILD RUNTIME")
    kinds = "FLOAT16 FLOAT32 FLOAT64 INT8 INT16 INT32 CHAR DIMS UNKNOWN BF16 INT64 FP8 INT4"
    trt.PluginFieldType = enum.Enum("PluginFieldType", kinds)
    trt.PluginArgType = enum.Enum("PluginArgType", "INT")
    trt.PluginArgDataType = enum.Enum("PluginArgDataType", "INT8 INT16 INT32")
    trt.PluginField = type("PluginField", (_Field,), {"repeats": repeats})
    trt.PluginFieldCollection = list
    trt.Dims = type("Dims", (), {"MAX_DIMS": 8})
    trt.DimsExprs = lambda of: [None] * of if isinstance(of, int) else list(of)
    trt.PluginTensorDesc = type("PluginTensorDesc", (), {})
    trt.DynamicPluginTensorDesc = type("DynamicPluginTensorDesc", (), {})
    registry = _Registry()
    trt.get_plugin_registry = lambda: registry
    trt.nptype = lambda _: None
    trt.Logger = type("Logger", (), {"WARNING": 1, "log": lambda *_: None})
    return trt


def _base(name: str) -> type:
    """A class of TensorRT's that remembers for which of its objects it was initialized."""

    def initialize(self: Any) -> None:
        self.__dict__.setdefault("initialized", set()).add(name)

    return type(name, (), {"__init__": initialize})


class _Field:
    """`PluginField`: has the address of its array, which may be gone when it is read."""

    repeats = False  # the first byte, as bindings before 10.16 do under NumPy 2

    def __init__(self, name: str, data: Any = None, kind: Any = None) -> None:
        self.name, self.type = name, kind
        is_array = isinstance(data, np.ndarray)
        self._size = data.nbytes if is_array else 0
        self._find = weakref.ref(data) if is_array else lambda: data

    @property
    def data(self) -> Any:
        found = self._find()
        if self._size and found is None:
            return np.full(self._size, 0x5A, np.int8)  # freed
        return np.full_like(found, found[0]) if self.repeats and self._size else found


def _parsed(name: str, value: Any) -> SimpleNamespace:
    """A field that TensorRT made of a node's attribute, with memory of its own."""
    data = np.frombuffer(value.encode(), np.int8) if isinstance(value, str) else np.array([value])
    return SimpleNamespace(name=name, data=data, type=None)


@contextmanager
def plugin_package(folder: Path) -> Iterator[tuple[Any, Any]]:
    """`tensorrt` and `tensorrt.plugin` of a folder of bindings."""
    trt = library()
    before = {name: each for name, each in sys.modules.items() if name.split(".")[0] == "tensorrt"}
    for name in before:
        del sys.modules[name]
    sys.modules["tensorrt"] = trt
    try:
        place = folder / "plugin"
        spec = importlib.util.spec_from_file_location(
            "tensorrt.plugin", place / "__init__.py", submodule_search_locations=[str(place)]
        )
        assert spec is not None
        assert spec.loader is not None
        found = sys.modules["tensorrt.plugin"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        yield trt, found
    finally:
        for name in [each for each in sys.modules if each.split(".")[0] == "tensorrt"]:
            del sys.modules[name]
        sys.modules.update(before)


class Node:
    """A plugin node as TensorRT takes it through a build: types, shapes, launch, kernel."""

    def __init__(self, trt: Any, op: Any, name: str, given: Mapping[str, Any]) -> None:
        self._trt, namespace = trt, name.partition("::")[0]
        definition = op._lib.QDP_REGISTRY[name]
        fields = [_parsed(key, value) for key, value in given.items()]
        creator = op._lib.QDP_CREATORS[name]
        request = trt.QuickPluginCreationRequest.STRICT_AOT
        short = name.partition("::")[2]
        self._plugin = creator.create_plugin(
            short, namespace, fields, trt.TensorRTPhase.BUILD, request
        )
        assert self._plugin.num_outputs == definition.num_outputs

    def outputs(self, inputs: list[tuple[list[Dim], Any]]) -> list[tuple[list[Dim], Any]]:
        """Shapes and types of the outputs."""
        self._inputs = inputs
        plugin, shapes = self._plugin, [shape for shape, _ in inputs]
        types = plugin.get_output_data_types([kind for _, kind in inputs], [*map(len, shapes)])
        found = plugin.get_output_shapes(shapes, [], Builder())
        self._types = [kind for _, kind in inputs] + types
        return list(zip(found, types, strict=True))

    def launch(self, sizes: Mapping[str, int]) -> SimpleNamespace:
        """With the sizes of a pass: grid, threads, shared memory, int32 arguments, kernel, PTX."""
        plugin, count = self._plugin, len(self._inputs)
        descriptions = [self._description(kind) for kind in self._types]
        plugin.get_supported_format_combinations(descriptions, count)
        plugin.set_tactic(0)
        launched, extra = SimpleNamespace(), _Extra()
        shapes = [shape for shape, _ in self._inputs]
        plugin.get_launch_params(shapes, descriptions, count, launched, extra, Builder())
        flat = [each.desc for each in descriptions]
        kernel, ptx = plugin.get_kernel(flat[:count], flat[count:])
        value = lambda each: each.expr.of(sizes)  # noqa: E731
        return SimpleNamespace(
            grid=tuple(value(getattr(launched, f"grid_{axis}")) for axis in "xyz"),
            threads=value(launched.block_x),
            shared_bytes=value(launched.shared_mem),
            sizes=[value(each) for each in extra],
            kernel=kernel,
            ptx=ptx,
        )

    def _description(self, kind: Any) -> Any:
        found = self._trt.DynamicPluginTensorDesc()
        linear = self._trt.TensorFormat.LINEAR
        found.desc = SimpleNamespace(type=kind, format=linear, scale=1.0, dims=[])
        found.opt = found.min = found.max = []
        return found


class _Extra(list):
    def __setattr__(self, name: str, value: int) -> None:
        assert name == "nbSymExprs"
        self[:] = [None] * value


def bindings() -> list[Path]:
    """Folders of bindings: installed ones, and that of the environment variable."""
    found = importlib.util.find_spec("tensorrt_bindings")
    named = [Path(each) for each in os.environ.get("TENSORRT_BINDINGS", "").split(":") if each]
    here = [Path(str(found.origin)).parent] if found is not None else []
    return [each for each in (*here, *named) if (each / "plugin" / "_lib.py").exists()]


def sizes(*dims: int | str) -> list[Dim]:
    return [dim(each) for each in dims]
