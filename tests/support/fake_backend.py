"""TensorRT's backend without TensorRT: builds keep the lowered graphs, which the fake GPU computes.

Everything else is the backend's own: plans, lowering, profiles, files of experts, runners. Needs
neither pytest nor torch, so that the proof folder carries it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
from fake_gpu import FakeDevice, FakeEngine

from edgellm.build import tensorrt as backend
from edgellm.build.tensorrt import compiler
from edgellm.build.tensorrt.builder import Built
from edgellm.build.tensorrt.profiles import Pass
from edgellm.build.tensorrt.target import Target
from edgellm.core.manifest import Engine
from edgellm.device_runtime.runners import tensorrt
from edgellm.device_runtime.runners.runner import Runner
from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import ATTEND
from edgellm.device_runtime.runners.tensorrt.library.trt_import import Library

VERSION = "11.4.0"
_PASSES = "passes"  # in the metadata of an engine's graph
_LIBRARY = SimpleNamespace(
    __name__="tensorrt",
    __version__=VERSION,
    PluginField=lambda _, data, __: SimpleNamespace(data=data),
    PluginFieldType=SimpleNamespace(CHAR=0),
)


def install(memory_bytes: int = 4 << 30) -> FakeDevice:
    """Let TensorRT's backend compile for the fake GPU, and run on it, in this process."""
    device = FakeDevice(memory_bytes)
    install_engines(device, device.sm, FakeEngine)
    return device


def install_engines(device: Any, sm: int, engine_type: type[FakeEngine]) -> None:
    """Let TensorRT's backend keep lowered graphs, which engines of a type run.

    Args:
        device: see `protocols.Device`.
        sm: compute capability of the graphs.
        engine_type: of the engines.
    """
    target = Target(Library(_LIBRARY, is_ahead_of_time=False), sm)

    def open_engine(folder: Path, engine: Engine) -> dict[str, Runner]:
        opened = {}
        for role, graphs in engine.graphs.items():
            path = folder / graphs[0].path
            loaded = engine_type(path, _passes(path), device)
            opened[role] = tensorrt.runner_of(role, engine, loaded, device)
        return opened

    for module in (backend, compiler):
        module.find_target = lambda _: target  # type: ignore[attr-defined]
    compiler.build = _build  # type: ignore[assignment]
    tensorrt.open_engine = open_engine


def _build(graph: Path, passes: Sequence[Pass], engine: Path, *_: Any, threads: int = 0) -> Built:
    """Write the lowered graph, with its weights and passes, in place of a plan."""
    del threads
    model = ir.load(graph)
    ir.external_data.load_to_model(model)
    facts = [{"name": one.name, "max_rows": one.max_rows, "ranges": one.ranges} for one in passes]
    model.metadata_props[_PASSES] = json.dumps(facts)
    ir.save(model, engine)
    own = sum(node.op_type == ATTEND for node in model.graph)
    return Built(kernels=(), caches={}, attentions=0, own_attentions=own, told_by="a fake GPU")


def _passes(engine: Path) -> list[Pass]:
    facts = json.loads(ir.load(engine).metadata_props[_PASSES])
    return [
        Pass(
            one["name"],
            one["max_rows"],
            {name: (low, high) for name, (low, high) in one["ranges"].items()},
        )
        for one in facts
    ]
