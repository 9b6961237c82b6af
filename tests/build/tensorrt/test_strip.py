"""`llm_build --stripWeights`: what it writes, what it asks the compiler, and where it is rejected.

The fake backend keeps the lowered graph with its weights in the place of a plan, so a plan's
weights can be compared with those that the refitter would read.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_backend
import onnx
import pytest
from conftest import assert_one_line_error
from onnx import numpy_helper
from tensorrt_bundles import Bundles

from edgellm.build import tensorrt as backend
from edgellm.build.tensorrt import builder, compiler
from edgellm.build.tensorrt.options import TensorRtOptions
from edgellm.build.tensorrt.target import Target
from edgellm.core.artifact import verify_files
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import LLM_ENGINE, VISUAL_ENGINE, load_engine
from edgellm.device_runtime.runners import tensorrt
from edgellm.device_runtime.runners.tensorrt.library.trt_import import Library

FLAGS = ("--maxInputLen", 48, "--maxKVCacheCapacity", 64, "--backend", "tensorrt")
FILES = {"llm.engine", "llm.lowered.onnx", "llm.lowered.data"}


@pytest.fixture(scope="module", params=["fp16", "int4_awq"])
def bundle(request, tmp_path_factory) -> Path:
    return Bundles(tmp_path_factory.mktemp(request.param)).make("base", request.param)


@pytest.fixture
def library(monkeypatch) -> Any:
    """The fake backend's library, with what plans without weights need; undone at the end."""
    places = (backend, "find_target"), (compiler, "find_target"), (compiler, "build")
    for module, name in (*places, (tensorrt, "open_engine")):
        monkeypatch.setattr(module, name, getattr(module, name))
    fake_backend.install()
    flags = SimpleNamespace(STRIP_PLAN="strip", REFIT_IDENTICAL="identical", TF32="tf32")
    names = {"Refitter": 1, "OnnxParserRefitter": 1, "BuilderFlag": flags}
    for name, each in {**names, "__version__": fake_backend.VERSION}.items():
        monkeypatch.setattr(fake_backend._LIBRARY, name, each, raising=False)
    return fake_backend._LIBRARY


def _build(command, bundle: Path, engine: Path, *flags: Any) -> Any:
    return command("llm_build", "--onnxDir", bundle, "--engineDir", engine, *FLAGS, *flags)


def _weights(graph: Path) -> dict[str, bytes]:
    model = onnx.load(graph)
    return {each.name: each.raw_data or _bytes(each) for each in model.graph.initializer}


def _bytes(tensor: onnx.TensorProto) -> bytes:
    return numpy_helper.to_array(tensor).tobytes()


@pytest.mark.usefixtures("library")
def test_the_refitter_finds_each_weight_in_the_engine(command_here, bundle, tmp_path):
    """After the folder was moved; names and bytes are those that were compiled."""
    result = _build(command_here, bundle, tmp_path / "engine", "--stripWeights")
    assert result.returncode == 0, result.stderr
    manifest = load_engine(tmp_path / "engine", LLM_ENGINE)
    assert {*manifest.files} > FILES
    assert manifest.options["--stripWeights"] is True
    moved = (tmp_path / "engine").rename(tmp_path / "moved")
    verify_files(moved, manifest.files)
    compiled = _weights(moved / "llm.engine")
    assert len(compiled) > 10
    assert _weights(moved / "llm.lowered.onnx") == compiled
    assert (moved / "llm.lowered.onnx").stat().st_size < manifest.files["llm.engine"].num_bytes / 2


def test_versions_and_capacities_share_a_file_of_weights(command_here, library, bundle, tmp_path):
    found = set()
    for version, capacity in (("10.3.0", 64), ("11.4.0", 128)):
        library.__version__ = version
        flags = "--maxKVCacheCapacity", capacity, "--stripWeights"
        assert _build(command_here, bundle, tmp_path / version, *flags).returncode == 0
        files = load_engine(tmp_path / version, LLM_ENGINE).files
        found.add(files["llm.lowered.data"].sha256)
    assert len(found) == 1


@pytest.mark.usefixtures("library")
def test_other_engines_keep_their_plan_only(command_here, bundle, tmp_path):
    assert _build(command_here, bundle, tmp_path / "engine").returncode == 0
    files = {*load_engine(tmp_path / "engine", LLM_ENGINE).files}
    assert FILES & files == {"llm.engine"}


@pytest.mark.usefixtures("library")
def test_visual_build_takes_it_too(command_here, tmp_path):
    bundle, engine = Bundles(tmp_path).make("smolvlm", "fp16"), tmp_path / "engine"
    flags = ("--onnxDir", bundle, "--engineDir", engine, "--backend", "tensorrt")
    result = command_here("visual_build", *flags, "--stripWeights")
    assert result.returncode == 0, result.stderr
    assert "visual.lowered.data" in load_engine(engine, VISUAL_ENGINE).files


@pytest.mark.usefixtures("library")
def test_a_failed_build_leaves_nothing(command_here, bundle, tmp_path, monkeypatch):
    def fail(graph: Path, *_: Any, **__: Any) -> None:
        assert graph.with_suffix(".data").stat().st_size > 1000
        raise EdgeLLMError("TensorRT does not compile the graph", hint="report it")

    monkeypatch.setattr(compiler, "build", fail)
    result = _build(command_here, bundle, tmp_path / "engine", "--stripWeights")
    assert_one_line_error(result, "does not compile the graph", "hint: ")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.usefixtures("library")
def test_a_dry_run_says_where_the_bytes_are(command_here, bundle, tmp_path):
    result = _build(command_here, bundle, tmp_path / "engine", "--stripWeights", "--dryRun")
    assert result.returncode == 0, result.stderr
    assert "MB are in files next to the plan, which has about " in result.stdout
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["Refitter", "OnnxParserRefitter", "STRIP_PLAN"])
def test_versions_without_a_name_are_rejected(
    command_here, library, bundle, tmp_path, monkeypatch, name
):
    monkeypatch.delattr(library.BuilderFlag if name.isupper() else library, name)
    result = _build(command_here, bundle, tmp_path / "engine", "--stripWeights")
    shown = f"BuilderFlag.{name}" if name.isupper() else name
    said = f"--stripWeights: TensorRT 11.4.0 has no {shown}, which plans without weights need"
    assert_one_line_error(result, said, "hint: leave out --stripWeights")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("is_stripped", [True, False])
def test_the_compiler_is_told(library, is_stripped):
    asked: list[Any] = []
    config = SimpleNamespace(set_flag=asked.append, clear_flag=lambda _: None)
    made = SimpleNamespace(create_builder_config=lambda: config)
    trt = SimpleNamespace(
        BuilderFlag=library.BuilderFlag, ProfilingVerbosity=SimpleNamespace(DETAILED=2)
    )
    target = Target(Library(trt, is_ahead_of_time=False), 87)
    options = TensorRtOptions(strip_weights=is_stripped)
    assert builder._configure(trt, made, target, options) is config
    assert asked == (["strip", "identical"] if is_stripped else [])
