"""Switches of TensorRT's compiler against known faults, and hints for known failures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest

from edgellm.build.tensorrt import builder
from edgellm.build.tensorrt.known_faults import (
    SWITCHES,
    compiler_switches,
    known_refusal,
    switches,
)
from edgellm.build.tensorrt.options import TensorRtOptions
from edgellm.build.tensorrt.target import Target
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.runners.tensorrt.library.trt_import import Library

NEW = (
    "-peep:fc_h_fusion=off -mlir:autotune:num_threads=1 -mlir:collective:fp4=off "
    "-cask_fusion:async_policy=1"
)
OLD = "-peep:match_dual_gemm=off -peep:fc_h_fusion=off"


@pytest.mark.parametrize(
    ("version", "has_fp4", "words"),
    [
        ((10, 3), False, ""),
        ((10, 13), False, OLD),
        ((10, 13), True, f"{OLD} -cask_fusion:max_num_epilogues=1"),
        ((10, 14), True, OLD),
        ((10, 16), True, NEW),
        ((11, 4), False, NEW),
    ],
)
def test_compiler_switches_depend_on_the_version(version, has_fp4, words):
    assert switches(version, has_fp4=has_fp4) == words


def test_compiler_switches_are_set_during_the_build_only(monkeypatch):
    """Read the environment as C does, since the interpreter's dictionary may differ."""
    monkeypatch.delenv(SWITCHES, raising=False)
    shown = [sys.executable, "-c", f"import os; print(os.environ.get({SWITCHES!r}))"]

    def seen() -> str:
        return subprocess.run(shown, capture_output=True, text=True, check=True).stdout.strip()

    with compiler_switches("-a=off"):
        assert seen() == "-a=off"
    assert SWITCHES not in os.environ
    monkeypatch.setenv(SWITCHES, "")
    with compiler_switches("-a=off"):
        assert seen() == ""


class Compiler:
    """A minimal fake of full TensorRT, which compiles nothing."""

    def __init__(self, version: str) -> None:
        self.__name__, self.__version__ = "tensorrt", version
        self.compiler_switches: str | None = None
        self.NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=0)
        self.LayerType = SimpleNamespace()

    def Builder(self, _: object) -> Any:  # noqa: N802 - TensorRT's name
        self.compiler_switches = os.environ.get(SWITCHES)
        network = SimpleNamespace(num_layers=0)
        return SimpleNamespace(max_threads=1, create_network=lambda _: network)

    def OnnxParser(self, *_: object) -> Any:  # noqa: N802 - TensorRT's name
        return SimpleNamespace(parse_from_file=lambda _: True)


@pytest.mark.parametrize(
    ("version", "sm", "dtype", "words", "hint"),
    [
        ("10.16.2.10", 87, "int8", "", "NVIDIA/TensorRT#4832"),
        ("10.16.2.10", 87, "int4", "", "report it"),
        ("10.16.2.10", 110, "int8", "", "report it"),
        ("10.3.0.26", 87, "int8", "", "report it"),
        ("10.13.3.9", 110, "int8", "Not implemented for PLUGIN_V3", "--kernels tensorrt"),
        ("10.3.0.26", 87, "int4", "Error Code 1: Cuda Runtime (out of memory)", "--workspace 256"),
    ],
)
def test_a_failed_build_hints_at_known_faults(
    monkeypatch, tmp_path: Path, version, sm, dtype, words, hint
):
    model = ir.from_onnx_text(
        f'<ir_version: 11, opset_import: ["" : 21]> g ({dtype}[2, 2] x, float[2] s) => (float[2, 2]'
        " y) { y = DequantizeLinear<axis = 0>(x, s) }"
    )
    ir.save(model, tmp_path / "graph.onnx")
    trt = Compiler(version)
    monkeypatch.delenv(SWITCHES, raising=False)
    log = SimpleNamespace(
        logger=None, failure=lambda what: EdgeLLMError(f"{what}: {words}", hint="report it")
    )
    monkeypatch.setattr(builder, "LibraryLog", lambda _: log)
    monkeypatch.setattr(builder, "_configure", lambda *_: SimpleNamespace())
    monkeypatch.setattr(builder, "progress_monitor", lambda *_: None)
    file = SimpleNamespace(receive=lambda *_: False, close=lambda: None)
    monkeypatch.setattr(builder, "EngineFile", lambda *_: file)
    target, said = Target(Library(trt, is_ahead_of_time=False), sm), []
    graph, engine = tmp_path / "graph.onnx", tmp_path / "engine"
    with pytest.raises(EdgeLLMError, match="does not compile the graph") as caught:
        builder.build(graph, [], engine, target, TensorRtOptions(), said.append)
    assert hint in caught.value.hint
    wanted = switches(target.library.version, has_fp4=False)
    assert (trt.compiler_switches or "") == wanted
    assert bool(said) == bool(wanted)


@pytest.mark.parametrize(
    ("node", "way"),
    [
        ("delta_rows", "--backend onnxruntime --device cpu"),
        ("expert_gates", "--backend onnxruntime --device cpu"),
        ("head_rows", "--kernels tensorrt"),
    ],
)
def test_recurrent_models_and_mixtures_run_on_the_cpu_instead(node, way):
    """TensorRT's operators do not compute them, but heads."""
    model = ir.from_onnx_text(
        '<ir_version: 11, opset_import: ["edgellm" : 1]> g (int64[6] table) => (int64[6] y)'
        f" {{ y = edgellm.{node}(table) }}"
    )
    target = Target(Library(Compiler("10.13.3.9"), is_ahead_of_time=False), 110)
    assert f": {way} needs none" in known_refusal(target, model, "Not implemented for PLUGIN_V3")
