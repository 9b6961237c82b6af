"""Search for the library, errors without one, and inputs that the parser must not ignore."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
from onnx import TensorProto, helper

from edgellm.build import resource_estimate
from edgellm.build.plan import Plan
from edgellm.build.tensorrt import target
from edgellm.build.tensorrt.options import TensorRtOptions
from edgellm.build.tensorrt.profiles import Pass
from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
)
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.device_runtime.networks.decoder import open_decoder
from edgellm.device_runtime.runners import tensorrt
from edgellm.device_runtime.runners.tensorrt.library import trt_import

FEATURES = dict.fromkeys(trt_import.FEATURES, object)


@pytest.fixture
def pretend(monkeypatch):
    """Fake modules and GPU of a machine; None: missing."""

    def machine(rtx: object = None, full: object = None, sm: int | None = None) -> None:
        monkeypatch.setitem(sys.modules, "tensorrt_rtx", rtx)
        monkeypatch.setitem(sys.modules, "tensorrt", full)
        for module in (trt_import, target, tensorrt):
            monkeypatch.setattr(module, "compute_capability", lambda: sm)

    return machine


def _module(name: str, version: str, *without: str) -> SimpleNamespace:
    features = {key: value for key, value in FEATURES.items() if key not in without}
    return SimpleNamespace(__name__=name, __version__=version, **features)


def test_a_missing_library_is_reported(pretend):
    pretend()
    with pytest.raises(EdgeLLMError, match="tensorrt is not installed; tensorrt_rtx is not") as err:
        trt_import.find_library()
    assert "pip install 'edgellm[tensorrt-rtx]'" in err.value.hint


def test_a_board_without_its_dla_compiler_gets_the_remedy(pretend, monkeypatch):
    """As in a container without NVIDIA's runtime; pip cannot help."""
    pretend()
    said = "libnvdla_compiler.so: cannot open shared object file: No such file or directory"

    def load(name: str) -> None:
        raise ImportError(said) if name == "tensorrt" else ModuleNotFoundError(name)

    monkeypatch.setattr(trt_import.importlib, "import_module", load)
    with pytest.raises(EdgeLLMError, match=f"tensorrt cannot be loaded: {said}") as caught:
        trt_import.find_library()
    assert "nvidia-l4t-dla-compiler" in caught.value.hint
    assert "pip" not in caught.value.hint


def test_auto_chooses_tensorrt_on_its_gpus_only(pretend):
    full = _module("tensorrt", "10.16.2.10")
    pretend(full=full, sm=110)
    assert target.find_target("").origin.machine == "sm110"
    assert tensorrt.available() == "TensorRT 10.16.2.10"
    pretend(full=full)  # its builder would end the process there
    with pytest.raises(EdgeLLMError, match="compiles only where an NVIDIA GPU is"):
        trt_import.find_library()


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (_module("tensorrt", "8.6.2.3"), "TensorRT 8.6.2.3 is too old, 10.3 is needed"),
        (_module("tensorrt", "10.15.0.1", "IAttention"), "TensorRT 10.15.0.1 has no IAttention"),
    ],
)
def test_versions_that_are_too_old_are_rejected(pretend, module, said):
    pretend(full=module, sm=87)
    with pytest.raises(EdgeLLMError, match=said) as caught:
        trt_import.find_library()
    assert "JetPack 6.1" in caught.value.hint


@pytest.mark.parametrize(("version", "updates"), [("10.3.0.26", False), ("10.15.1", True)])
def test_newer_features_depend_on_the_version(pretend, version, updates):
    without = () if updates else trt_import.FEATURES
    pretend(full=_module("tensorrt", version, *without), sm=87)
    found = trt_import.find_library()
    assert (found.label, found.updates_in_place) == (f"TensorRT {version}", updates)
    assert found.runs_python_plugins != updates


@pytest.mark.parametrize(
    ("driver", "needed", "said"),
    [
        ((12, 4), (13, 0), "needs CUDA 13, the NVIDIA driver runs CUDA 12.4 at most"),
        ((13, 0), (13, 0), ""),
        (None, (12, 0), ""),
    ],
)
def test_drivers_older_than_the_library_are_rejected(pretend, monkeypatch, driver, needed, said):
    pretend(full=_module("tensorrt", "10.16.2.10"), sm=110)
    monkeypatch.setattr(target, "driver_cuda", lambda: driver)
    monkeypatch.setattr(target, "_needed_cuda", lambda: needed)
    if not said:
        assert target.find_target("").sm == 110
        return
    with pytest.raises(EdgeLLMError, match=said) as caught:
        target.find_target("")
    assert "install a newer NVIDIA driver" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "sm"), [("89", 89), ("8.9", 89), ("sm120", 120), ("SM_12.0", 120)]
)
def test_a_gpu_has_several_spellings(text, sm):
    assert target.parse_sm(text) == sm


def test_full_tensorrt_takes_several_copies_of_the_weights(
    pretend, tiny_bundle, tmp_path, monkeypatch
):
    """As reports of its builds say; else the system ends a build that fits by the estimate."""
    full, bundle = _module("tensorrt", "10.16.2.10"), load_bundle(tiny_bundle, LLM_BUNDLE)
    pretend(full=full, sm=87)
    monkeypatch.setattr(resource_estimate, "available_memory_bytes", lambda: 1000)

    def predict(parser: object, workspace_mib: int = 0) -> tuple[int, str]:
        full.OnnxParser = parser
        options = TensorRtOptions(workspace_mib=workspace_mib)
        plan = Plan(max_input_len=16, kv_capacity=32, threads=1, prefill="auto", options=options)
        found = resource_estimate.predict(tiny_bundle, bundle, plan, "tensorrt", tmp_path / "e")
        (need,) = (need for need in found.needs if need.what == "build memory")
        return found.estimate.peak_build_bytes, need.remedy

    mapped, remedy = predict(SimpleNamespace(load_initializer=None))
    weights = predict(SimpleNamespace())[0] - mapped  # its parser has a copy, too
    assert weights == pytest.approx((tiny_bundle / "model.weights").stat().st_size, rel=0.1)
    limited, other = predict(SimpleNamespace(load_initializer=None), workspace_mib=256)
    assert limited - mapped == 256 << 20
    own = mapped - 3 * weights
    assert own == pytest.approx(340e6, rel=0.1)
    assert "(an AGX Orin for an Orin Nano)" in remedy
    assert "--workspace 256" in remedy
    assert "a smaller --workspace" in other


MANIFEST = SimpleNamespace(
    backend="tensorrt",
    backend_version="TensorRT 10.16.2.10",
    machine="sm110",
    builder="llm_build",
    decoder=SimpleNamespace(audio=None),
)


@pytest.mark.parametrize(
    ("full", "sm", "fault"),
    [
        (None, 110, "this machine has no TensorRT"),
        ("10.16.2.10", 87, "this machine has sm87"),
        ("11.4.1.5", 110, "this machine has TensorRT 11.4.1.5"),
        ("10.16.2.10", None, "this machine has no NVIDIA GPU"),
    ],
)
def test_engines_of_another_origin_are_rejected(pretend, full, sm, fault):
    pretend(full=full and _module("tensorrt", full), sm=sm)
    with pytest.raises(BrokenArtifactError, match=f"TensorRT 10.16.2.10 for sm110, {fault}") as err:
        open_decoder(Path("engine"), MANIFEST)  # type: ignore[arg-type]
    assert "run llm_build on the machine" in err.value.hint


# --------------------------------------------------------------------- what the parser says
ROWS = Pass("all", 4, {"rows": (1, 4)})


def _compile(folder: Path, nodes: list[onnx.NodeProto], *inputs: onnx.ValueInfoProto) -> None:
    """Parse and compile a graph whose output is called y."""
    pytest.importorskip("tensorrt_rtx")
    from edgellm.build.tensorrt.builder import build

    output = helper.make_tensor_value_info("y", TensorProto.FLOAT16, None)
    graph = helper.make_graph(nodes, "g", list(inputs), [output])
    opset = helper.make_opsetid("", 24)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), folder / "g.onnx")
    options = TensorRtOptions(target_sm="89")
    build(
        folder / "g.onnx",
        [ROWS],
        folder / "g.engine",
        target.find_target("89"),
        options,
        lambda _: None,
    )


def _half(name: str, *shape: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape)


def test_operators_unknown_to_the_parser_are_reported(tmp_path):
    node = helper.make_node("Hardmax", ["x"], ["y"], name="the_node")
    unknown = helper.make_node("NoSuchOperator", ["x"], ["y"], name="the_node", domain="nowhere")
    _compile(tmp_path, [node], _half("x", "rows", 8))
    with pytest.raises(EdgeLLMError, match=r"does not take the graph: .*NoSuchOperator the_node"):
        _compile(tmp_path, [unknown], _half("x", "rows", 8))


def test_inputs_that_the_parser_would_ignore_are_rejected(tmp_path):
    """The parser drops an attention's number of valid keys, and attends to garbage."""
    cache = [_half(name, 1, 2, 16, 16) for name in "kv"]
    lengths = helper.make_tensor_value_info("lengths", TensorProto.INT64, [1])
    inputs = ["q", "k", "v", "", "", "", "lengths"]
    node = helper.make_node("Attention", inputs, ["y"], name="attention")
    with pytest.raises(EdgeLLMError, match="would ignore an input of the graph"):
        _compile(tmp_path, [node], _half("q", 1, 2, "rows", 16), *cache, lengths)
