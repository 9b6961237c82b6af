"""Checks of NVIDIA's real bindings of TensorRT, in a process that has no library of TensorRT.

`real_bindings.py` starts it. It reads names and attributes of nodes from standard input, and prints
results as JSON in its last line.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorrt as trt  # type: ignore[import-not-found]

from edgellm.build.tensorrt import build_monitor, plugins
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.runners.tensorrt.library import log, python_plugins
from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import GIVEN, NAMESPACE
from edgellm.device_runtime.runners.tensorrt.library.kernel_nodes import PLUGINS
from edgellm.device_runtime.runners.tensorrt.library.trt_import import (
    Library,
    plugin_module,
    require_attributes,
)

LAYERS = 40
CONTEXT, STREAM = 0x1000, 0x7000  # of `stub_cuda.c`
TEXTS = [b"{}", b"x", json.dumps({"heads": 6, "layer": 31}).encode(), bytes(range(1, 128)) * 30]
_ALIVE: list[Any] = []  # nodes: TensorRT destroys them, and only TensorRT may
_SIGNATURE = re.compile(r"^(?:\d+\. )?\w+\((.*)\) ->", re.MULTILINE)


class Registry:
    """A registry as `IPluginRegistry`; the empty library has none."""

    def __init__(self) -> None:
        self.creators: dict[str, Any] = {}

    def register_creator(self, creator: Any, namespace: str) -> bool:
        assert namespace == NAMESPACE == creator.plugin_namespace
        self.creators[creator.name] = creator
        return True

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        assert (version, namespace) == ("1", NAMESPACE)
        return self.creators.get(name)


# ------------------------------------------------------------------------------- names
def _find(path: str) -> Any:
    """What has a path from TensorRT's module.

    Raises:
        AttributeError: it is missing.
        EdgeLLMError: there is no module `plugin`.
    """
    found = trt
    for word in path.split("."):
        is_module = found is trt and word == "plugin"
        found = plugin_module(trt) if is_module else getattr(found, word)
    return found


def _parameters(text: str) -> list[tuple[str, bool]]:
    """Names of a signature's parameters, and which have defaults."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[({") - (letter in "])}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    pairs = [(part.partition(":")[0].strip(), "=" in part) for part in parts if part.strip()]
    return [pair for pair in pairs if pair[0] not in ("self", "*", "/")]


def _accepts(found: Any, count: int, keywords: Sequence[str]) -> bool:
    """Whether a function takes a call; its docstring has the signatures."""
    if inspect.isfunction(found):
        try:
            inspect.signature(found).bind(*[None] * count, **dict.fromkeys(keywords))
        except TypeError:
            return False
        return True
    if inspect.isclass(found):
        found = found.__init__
    signatures = _SIGNATURE.findall(found.__doc__ or "")
    return not signatures or any(_fits(_parameters(each), count, keywords) for each in signatures)


def _fits(parameters: list[tuple[str, bool]], count: int, keywords: Sequence[str]) -> bool:
    names = [name for name, _ in parameters]
    if "*args" in names:
        return True
    needed = {name for name, has_default in parameters[count:] if not has_default}
    return count <= len(names) and needed <= {*keywords} <= {*names[count:]}


def check_names(uses: dict[str, list[tuple[int, list[str]]]]) -> dict[str, list[str]]:
    """Which names are missing, and which calls do not fit a signature."""
    missing, refused = [], []
    for path, calls in uses.items():
        try:
            found = _find(path)
        except (AttributeError, EdgeLLMError):
            missing.append(path)
            continue
        for count, keywords in calls:
            # `Class.__init__(self)` names its object.
            given = count - (path.endswith("__init__") and count > 0)
            if not _accepts(found, given, keywords):
                said = (found.__doc__ or "").partition("\n")[0]
                refused.append(f"{path}: {count} arguments, {keywords}, of {said}")
    return {"missing": missing, "refused": refused}


def check_overridden() -> list[str]:
    """Methods of edgellm's classes that TensorRT's classes do not have, so would never call."""
    bases = trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime
    classes: list[tuple[type, tuple[type, ...]]] = [
        (python_plugins._Node, bases),
        (type(log.LibraryLog(trt).logger), (trt.ILogger,)),
        (type(build_monitor.progress_monitor(trt, print, [])), (trt.IProgressMonitor,)),
    ]
    if hasattr(trt, "IStreamWriter"):
        classes.append((type(build_monitor._writer(trt, len)), (trt.IStreamWriter,)))
    return [
        f"{made.__name__}.{name}"
        for made, of in classes
        for name, each in vars(made).items()
        if inspect.isfunction(each) and not name.startswith("_")
        if not any(hasattr(base, name) for base in of)
    ]


# ------------------------------------------------------------------------------ fields
def check_fields() -> dict[str, Any]:
    """Which fields return the bytes that they were made of, and what `require_attributes` says."""
    kept = [np.frombuffer(text, np.int8) for text in TEXTS]
    fields = [trt.PluginField("a", data, trt.PluginFieldType.CHAR) for data in kept]
    gc.collect()
    right = [bytes(field.data) == text for field, text in zip(fields, TEXTS, strict=True)]
    try:
        require_attributes(trt)
    except EdgeLLMError as error:
        return {"right": right, "error": str(error), "hint": error.hint}
    return {"right": right, "error": "", "hint": ""}


# ----------------------------------------------------------------------------- plugins
def _given(layer: int) -> dict[str, Any]:
    """A node's attribute for any of the plugins; the layers differ."""
    sizes = {"heads": 6, "kv_heads": 2, "head_dim": 64, "codes": "fp16", "capability": 87}
    sizes |= {"own_tables": 0, "window": 0, "cap_bits": 0, "sunk": 0, "width": 24, "size": 3}
    sizes |= {"key_heads": 1, "key_dim": 8, "value_dim": 16, "takes": 0}
    sizes |= {"experts": 4, "top_k": 2, "hidden": 32, "inner": 16, "block": 32}
    sizes |= {"matrix": layer, "vocab": 50}
    sizes |= {"gating_bits": [0] * 4, "steps": [0] * 6, "number_bits": [0] * 4}
    return {**sizes, "layer": layer, "entry": layer}


def _attributes(plugin: str, nodes: dict[str, list[str]]) -> list[str]:
    """Attributes of `LAYERS` layers, then those of networks' nodes, by the plugins' names."""
    return [*(json.dumps(_given(layer)) for layer in range(LAYERS)), *nodes.get(plugin, [])]


def _parsed(text: str, kept: list[Any]) -> Any:
    """Fields that the parser makes of a node's attribute; it keeps their memory until the end."""
    kept.append(np.frombuffer(text.encode(), np.int8))
    field = trt.PluginField(GIVEN, kept[-1], trt.PluginFieldType.CHAR)
    return trt.PluginFieldCollection([field])


def _texts(nodes: Sequence[Any]) -> list[str]:
    """What the nodes serialize, read when all of them have been made."""
    fields = [node.get_fields_to_serialize() for node in nodes]
    gc.collect()
    noise = [np.full(300, 0x5A, np.int8) for _ in range(1000)]  # takes memory that is free
    found = [bytes(field.data).decode(errors="replace") for (field,) in map(tuple, fields)]
    del noise
    return found


def check_python_plugins(nodes: dict[str, list[str]]) -> dict[str, Any]:
    """Attributes of graph, plan and contexts, of each plugin."""
    registry = Registry()
    trt.get_plugin_registry = lambda: registry
    python_plugins.register(trt)
    found: dict[str, Any] = {"expected": {}, "plan": {}, "contexts": {}, "types": {}}
    for plugin in PLUGINS:
        texts = found["expected"][plugin.name] = _attributes(plugin.name, nodes)
        creator, kept = registry.creators[plugin.name], []
        assert [field.name for field in creator.field_names] == [GIVEN]
        build, run = trt.TensorRTPhase.BUILD, trt.TensorRTPhase.RUNTIME
        made = [creator.create_plugin(plugin.name, _parsed(t, kept), build) for t in texts]
        cloned = [node.clone() for node in made]
        for node in cloned:
            node.configure_plugin([], [])
        written = _texts(cloned)
        read = [creator.create_plugin(plugin.name, _parsed(t, kept), run) for t in written]
        contexts = [node.attach_to_context(None) for node in read]
        _ALIVE.extend([*made, *cloned, *read, *contexts])
        found["plan"][plugin.name], found["contexts"][plugin.name] = written, _texts(contexts)
        found["types"][plugin.name] = [t.name for t in contexts[0].get_output_data_types([])]
        assert contexts[0].num_outputs == plugin.num_outputs
        _check_formats(contexts[0], len(plugin.inputs))
        _check_launch(contexts[0], len(plugin.inputs))
    return found


def _check_launch(node: Any, inputs: int) -> None:
    """A pass launches the kernel on TensorRT's stream, in its context; it can be captured."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.stub_call.restype = ctypes.c_char_p
    described = [trt.PluginTensorDesc() for _ in range(inputs)]
    for each in described:
        each.dims = (1, 5, 8)
    stream, graph = ctypes.c_void_p(STREAM), ctypes.c_void_p()
    driver.cuCtxPushCurrent_v2(ctypes.c_void_p(CONTEXT))
    driver.cuStreamBeginCapture_v2(stream, 1)
    node.enqueue(described, [], [1 << 20] * inputs, [1 << 20] * node.num_outputs, 0, STREAM)
    assert driver.stub_call(driver.stub_num_calls() - 1) == b"cuLaunchKernel"
    assert driver.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
    driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _check_formats(node: Any, inputs: int) -> None:
    """Outputs have the node's types and the linear layout."""
    kinds = [trt.int8] * inputs + node.get_output_data_types([])
    for place in range(inputs, len(kinds)):
        for kind in (trt.float16, trt.float32):
            for layout in (trt.TensorFormat.LINEAR, trt.TensorFormat.HWC8):
                tensors = [trt.DynamicPluginTensorDesc() for _ in kinds]
                for tensor in tensors:
                    desc = trt.PluginTensorDesc()
                    desc.type, desc.format = kind, layout
                    tensor.desc = desc
                fits = kind == kinds[place] and layout == trt.TensorFormat.LINEAR
                assert node.supports_format_combination(place, tensors, inputs) == fits


def check_quick_plugins(nodes: dict[str, list[str]]) -> dict[str, Any]:
    """The same of plugins whose kernels are in the plan, by NVIDIA's module `plugin`."""
    registry = Registry()
    trt.get_plugin_registry = lambda: registry
    op = plugin_module(trt)
    plugins.register(trt, op)
    plugins.register(trt, op)  # a second build of the process
    found: dict[str, Any] = {"expected": {}, "nodes": {}, "types": {}, "module": op.__name__}
    for plugin in PLUGINS:
        texts = found["expected"][plugin.name] = _attributes(plugin.name, nodes)
        creator, kept = registry.creators[plugin.name], []
        made = [
            creator.create_plugin(
                plugin.name,
                NAMESPACE,
                _parsed(text, kept),
                trt.TensorRTPhase.BUILD,
                trt.QuickPluginCreationRequest.STRICT_AOT,
            )
            for text in texts
        ]
        _ALIVE.extend(made)
        made = [node.clone() for node in made]
        _ALIVE.extend(made)
        gc.collect()
        found["nodes"][plugin.name] = [node.attrs[GIVEN] for node in made]
        count = len(plugin.inputs)
        types = made[0].get_output_data_types([trt.float16] * count, [3] * count)
        found["types"][plugin.name] = [t.name for t in types]
        assert made[0].num_outputs == plugin.num_outputs
    return found


def _results(asked: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "trt", trt.__version__
    yield "numpy", np.__version__
    yield "names", check_names(asked["names"])
    yield "overridden", check_overridden()
    yield "fields", check_fields()
    is_python = Library(trt, False).runs_python_plugins
    check = check_python_plugins if is_python else check_quick_plugins
    try:
        yield "plugins", check(asked["nodes"])
    except EdgeLLMError as error:
        yield "plugins", {"error": str(error)}


if __name__ == "__main__":
    results = json.dumps(dict(_results(json.load(sys.stdin))))
    sys.stdout.write(f"\n{results}")  # TensorRT prints, too
    sys.stdout.flush()
    os._exit(0)  # else the interpreter destroys the nodes
