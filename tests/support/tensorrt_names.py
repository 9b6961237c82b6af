"""Names of TensorRT's Python interface that edgellm's code uses, read from its syntax trees.

A chain that contains `trt` or `_trt` begins at TensorRT's module. Other objects have the names of
`OBJECTS`.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = "build/tensorrt", "device_runtime/runners/tensorrt", "tools/doctor"
_LIBRARY = "device_runtime/runners/tensorrt/library"
RTX_ONLY_FILE = f"{_LIBRARY}/specialized_kernels.py"
PLUGIN = "plugin"  # the module `tensorrt.plugin`
OBJECTS: Mapping[str, Mapping[str, str]] = {
    "build/tensorrt/builder.py": {
        "builder": "Builder",
        "config": "IBuilderConfig",
        "network": "INetworkDefinition",
        "parser": "OnnxParser",
        "first": "ParserError",
        "layer": "ILayer",
        "layer.attention": "IAttention",
        "profile": "IOptimizationProfile",
    },
    "build/tensorrt/plugins.py": {"op": PLUGIN},
    f"{_LIBRARY}/attention_nodes.py": {"op": PLUGIN},
    f"{_LIBRARY}/recurrent_nodes.py": {"op": PLUGIN},
    "build/tensorrt/build_monitor.py": {"builder": "Builder"},
    "build/tensorrt/engine_layers.py": {
        "runtime": "Runtime",
        "engine": "ICudaEngine",
        "inspector": "EngineInspector",
    },
    f"{_LIBRARY}/log.py": {"severity": "ILogger.Severity"},
    f"{_LIBRARY}/refit.py": {"refitter": "Refitter", "parser": "OnnxParserRefitter"},
    f"{_LIBRARY}/runtime.py": {
        "runtime": "Runtime",
        "engine": "ICudaEngine",
        "self._engine": "ICudaEngine",
        "context": "IExecutionContext",
        "self._context": "IExecutionContext",
    },
    f"{_LIBRARY}/python_plugins.py": {
        "registry": "IPluginRegistry",
        "builder": "IExprBuilder",
        "self._builder": "IExprBuilder",
    },
    RTX_ONLY_FILE: {
        "engine": "ICudaEngine",
        "config": "IRuntimeConfig",
        "self._cache": "IRuntimeCache",
        "strategies": "DynamicShapesKernelSpecializationStrategy",
    },
}
_RETURNS = {
    "IBuilderConfig.get_timing_cache": "ITimingCache",
    "INetworkDefinition.get_layer": "ILayer",
    "ILayer.get_input": "ITensor",
    "ILayer.get_output": "ITensor",
    "OnnxParserRefitter.get_error": "ParserError",
}
_OF_EVERY_MODULE = {"__name__", "__version__"}
Call = tuple[int, tuple[str, ...]]  # the number of positional arguments, and keywords
Names = dict[str, list[Call]]  # paths from TensorRT's module, with the calls of each


def names() -> tuple[Names, Names]:
    """Names of full TensorRT and TensorRT-RTX, and those of TensorRT-RTX alone."""
    shared: Names = defaultdict(list)
    of_rtx: Names = defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            place = path.relative_to(ROOT).as_posix()
            reader = _Reader(OBJECTS.get(place, {}), of_rtx if place == RTX_ONLY_FILE else shared)
            reader.visit(ast.parse(path.read_text("utf-8")))
    return dict(shared), dict(of_rtx)


class _Reader(ast.NodeVisitor):
    def __init__(self, objects: Mapping[str, str], found: Names) -> None:
        self._objects, self._found = objects, found

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._path(node)
        if path and path != PLUGIN:
            self._found[path] += []
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        path = self._path(node.func) if isinstance(node.func, ast.Attribute) else None
        has_stars = any(isinstance(each, ast.Starred) for each in node.args)
        if path and not has_stars:
            keywords = tuple(str(each.arg) for each in node.keywords)
            self._found[path].append((len(node.args), keywords))
        self.generic_visit(node)

    def _path(self, node: ast.expr) -> str | None:
        """Where an expression is, from TensorRT's module; None: somewhere else."""
        if isinstance(node, ast.Call):
            return _RETURNS.get(self._path(node.func) or "")
        words = ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""
        if words in self._objects:
            return self._objects[words]
        if words.rpartition(".")[2] in ("trt", "_trt"):
            return ""
        if not isinstance(node, ast.Attribute):
            return None
        owner = self._path(node.value)
        if owner is None or node.attr in _OF_EVERY_MODULE:
            return None
        return f"{owner}.{node.attr}".lstrip(".")
