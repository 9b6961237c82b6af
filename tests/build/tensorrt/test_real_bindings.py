"""edgellm's calls of TensorRT on NVIDIA's own bindings, version by version, under both NumPys."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import real_bindings
import tensorrt_names
from lowered_engines import lower_for_gpu
from tensorrt_bundles import two_layer_bundle

from edgellm.build.tensorrt.lowering.kernel_attention import Kernels
from edgellm.build.tensorrt.lowering.op_table import Version
from edgellm.device_runtime.runners.tensorrt.library import kernel_nodes
from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import GIVEN, NAMESPACE
from edgellm.device_runtime.runners.tensorrt.library.trt_import import FIRST_QUICK_PLUGINS

PLUGINS = {
    "store_rows": ["HALF"],
    "attend": ["FLOAT", "FLOAT"],
    "finish": ["HALF"],
    "convolve_rows": ["HALF"],
    "delta_rows": ["FLOAT"],
    "route_rows": ["INT64", "HALF"],
    "group_rows": ["INT32", "INT32"],
    "expert_gates": ["HALF"],
    "expert_downs": ["HALF"],
    "sum_experts": ["HALF"],
    "look_up_rows": ["HALF"],
    "head_rows": ["FLOAT"],
}
NETWORKS = "qwen3_next", "granitemoehybrid"  # hybrids with experts: the delta rule, Mamba 2
RTX_ONLY = "ComputeCapability", "num_compute_capabilities", "set_compute_capability"
# What older versions lack; edgellm asks for it with hasattr, or by version.
SINCE: dict[str, Version] = {
    "IStreamWriter": (10, 13),
    "IStreamWriter.__init__": (10, 13),
    "Builder.build_serialized_network_to_stream": (10, 13),
    "OnnxParser.load_initializer": (10, 13),
    "OnnxParser.load_model_proto": (10, 13),
    "OnnxParser.parse_model_proto": (10, 13),
    "IAttention": (10, 14),
    "IAttention.decomposable": (10, 14),
    "IAttentionInputLayer": (10, 14),
    "ICudaEngine.get_aliased_input_tensor": (10, 15),
}
CASES = [
    pytest.param(version, numpy, id=f"{version}, NumPy {numpy}")
    for version in real_bindings.EACH_CHANGE
    for numpy in ("1", "2")
] + [
    pytest.param(version, numpy, id=f"{version}, NumPy {numpy}", marks=pytest.mark.nightly)
    for version in real_bindings.NIGHTLY
    for numpy in ("1", "2")
]
Ask = Callable[..., dict[str, Any]]
every_version = pytest.mark.parametrize(("version", "numpy"), CASES)


@pytest.fixture(scope="module")
def ask(tmp_path_factory) -> Ask:
    """Results of a version under a NumPy; one process for each."""
    libraries = real_bindings.make_libraries(tmp_path_factory.mktemp("libraries"))
    shared, _ = tensorrt_names.names()
    used = {path: calls for path, calls in shared.items() if not _is_of_rtx(path)}
    nodes = attributes_of_nodes(tmp_path_factory.mktemp("networks"))

    @functools.cache
    def found(version: str, numpy: str, *, is_pips: bool = False) -> dict[str, Any]:
        printed = real_bindings.run(
            "bindings_child.py",
            libraries,
            {"names": used, "nodes": nodes},
            version=version,
            numpy=numpy,
            is_pips=is_pips,
        )
        return json.loads(printed.splitlines()[-1])

    return found


def attributes_of_nodes(folder: Path) -> dict[str, list[str]]:
    """Attributes of all nodes of hybrids and mixtures, by plugins, as the parser reads them."""
    found: dict[str, list[str]] = {plugin.name: [] for plugin in kernel_nodes.PLUGINS}
    for model_type in NETWORKS:
        bundle = two_layer_bundle(folder / model_type, model_type)
        target = folder / f"{model_type}.onnx"
        lower_for_gpu(bundle / "model.onnx", target, kernels=Kernels(sm=87, codes="fp16"))
        for node in ir.load(target).graph:
            if node.domain == NAMESPACE:
                found[node.op_type].append(node.attributes[GIVEN].as_string())
    return found


def _is_of_rtx(path: str) -> bool:
    return bool({*RTX_ONLY} & {*path.split(".")})


def _number(version: str) -> Version:
    major, minor = version.split(".")
    return int(major), int(minor)


def _repeats(version: str, numpy: str) -> bool:
    """Bindings that repeat a field's first byte."""
    return numpy == "2" and _number(version) < (10, 16)


@every_version
def test_every_name_exists(ask, version, numpy):
    found = ask(version, numpy)
    assert found["trt"].startswith(f"{version}.")
    assert found["numpy"].startswith(f"{numpy}.")
    missing = {*found["names"]["missing"]}
    if _number(version) < FIRST_QUICK_PLUGINS:
        missing = {path for path in missing if not path.startswith("plugin.")}
    assert missing == {path for path, since in SINCE.items() if _number(version) < since}
    assert found["names"]["refused"] == found["overridden"] == []


def test_names_of_every_part_are_read():
    """Else a renamed variable would hide its names."""
    shared, of_rtx = tensorrt_names.names()
    owners = {path.rpartition(".")[0] for path in shared}
    read = {owner for objects in tensorrt_names.OBJECTS.values() for owner in objects.values()}
    assert read - {path.rpartition(".")[0] for path in of_rtx} <= owners
    assert (1, ("ignore_mismatch",)) in shared["IBuilderConfig.set_timing_cache"]
    assert shared["ITimingCache.serialize"] == [(0, ())]


def test_every_name_exists_in_tensorrt_rtx():
    trt = pytest.importorskip("tensorrt_rtx", reason="needs pip install '.[tensorrt-rtx]'")
    shared, of_rtx = tensorrt_names.names()
    found = [path for path in {**shared, **of_rtx} if not path.startswith("plugin.")]
    assert [path for path in found if not _has(trt, path)] == []


def _has(found: Any, path: str) -> bool:
    for word in path.split("."):
        if not hasattr(found, word):
            return False
        found = getattr(found, word)
    return True


@every_version
def test_attributes_of_plugins_are_those_that_were_given(ask, version, numpy):
    """Or else edgellm says so, before TensorRT calls a plugin."""
    found = ask(version, numpy)["fields"]
    if _repeats(version, numpy):
        assert not all(found["right"])
        assert f"of TensorRT {version}." in found["error"]
        assert "numpy<2" in found["hint"]
        return
    assert all(found["right"])
    assert found["error"] == ""


@every_version
def test_each_layer_keeps_its_own_attribute(ask, version, numpy):
    """Of 40 layers and of networks, from the graph to a plan, and before 10.9 to a context."""
    found = ask(version, numpy)["plugins"]
    if _repeats(version, numpy):
        assert "change attributes of plugins" in found["error"]
        return
    assert found["types"] == PLUGINS
    for texts in found["expected"].values():
        assert [json.loads(text)["layer"] for text in texts[:40]] == [*range(40)]
        assert len(texts) > 40  # nodes of networks
    stages = ("plan", "contexts") if _number(version) < FIRST_QUICK_PLUGINS else ("nodes",)
    for stage in stages:
        assert found[stage] == found["expected"]


@pytest.mark.parametrize(
    "version",
    ["10.13", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("10.9", "11.4"))],
)
def test_plugins_of_pips_packages(ask, version):
    """Its module `tensorrt` has no `plugin`; that of the bindings makes the same nodes."""
    found = ask(version, "1", is_pips=True)["plugins"]
    assert found["module"] == "tensorrt_bindings.plugin"
    assert found["nodes"] == found["expected"]
