"""Edgellm's kernels as quickly deployable plugins of TensorRT, for the build.

A plugin describes its outputs and the launch of its kernel (`kernel_nodes.py`). The PTX goes into
the plan, so running an engine needs neither this module nor Python. A plugin of
`tensorrt.plugin` is two functions with given signatures; here they are generated from a table.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from types import GenericAlias
from typing import Any

from edgellm.device_runtime.kernels.triton import prebuilt
from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import (
    GIVEN,
    NAMESPACE,
    Launch,
    Plugin,
    Shapes,
)
from edgellm.device_runtime.runners.tensorrt.library.kernel_nodes import PLUGINS
from edgellm.device_runtime.runners.tensorrt.library.trt_import import require_attributes


def register(trt: Any, op: Any) -> None:
    """Register the plugins with TensorRT, once.

    Args:
        trt: the module `tensorrt`.
        op: its module `tensorrt.plugin`.

    Raises:
        EdgeLLMError: see `require_attributes`.
    """
    require_attributes(trt)
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
    """Set the signature of a function, which `tensorrt.plugin` inspects."""
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
