"""`--fallbackPrecision`: bundles in a precision that a GPU does not have."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from conftest import assert_one_line_error
from tensorrt_bundles import CAPACITY, INPUT, Bundles

from edgellm.build.lowering.function_calls import find_calls
from edgellm.build.lowering.linears.weights import linear_layers
from edgellm.build.tensorrt.lowering.precision_fallback import (
    fall_back,
    lacking_kinds,
    temporary_weights,
)
from edgellm.build.tensorrt.target import Target
from edgellm.core.manifest import LLM_ENGINE, load_engine
from edgellm.core.onnx_functions import (
    ROUND_INPUT,
    ROUND_INPUT_FP4,
)
from edgellm.device_runtime.runners.tensorrt.library.trt_import import Library

LACKING = {"nvfp4": "fp4", "fp8": "fp8"}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory) -> Bundles:
    return Bundles(tmp_path_factory.mktemp("bundles"))


@pytest.mark.parametrize("precision", LACKING)
def test_weights_stay_within_the_fallback_precision(bundles, tmp_path, precision):
    model = ir.load(bundles.make("base", precision) / "model.onnx")
    before = {node.name: weight.dense() for node, weight in linear_layers(model.graph)}
    kinds = {weight.kind for _, weight in linear_layers(model.graph)}
    for fallback, share in (("fp16", 1e-3), ("int4", 0.105)):
        copy = model.clone()
        with temporary_weights(tmp_path) as weights:
            assert fall_back(copy, weights, {"fp4", "fp8"}, fallback) == {LACKING[precision]}
            found = {node.name: weight for node, weight in linear_layers(copy.graph)}
            assert found.keys() == before.keys()
            dense = {"fp16": "dense", "int4": "int4"}[fallback]
            assert {each.kind for each in found.values()} == kinds - {LACKING[precision]} | {dense}
            blocks = {(each.in_features, each.parts[0].block_size) for each in found.values()}
            assert blocks == {(96, 0), (128, 64 if fallback == "int4" else 0)}  # 64 or floats
            for name, weight in found.items():
                error = np.abs(weight.dense() - before[name]).mean()
                assert error < share * np.abs(before[name]).mean(), name
        copied = [node for node in copy.graph if any(v.uses() for v in node.outputs)]
        read = {id(node) for node in copied}
        rounded = find_calls(copy.graph, ROUND_INPUT, ROUND_INPUT_FP4)
        assert not [node for node in rounded if id(node) in read]
        assert not (tmp_path / "fallback.data").exists()


def test_unsupported_precisions_depend_on_gpu_and_library():
    def of(version: str, sm: int) -> set[str]:
        trt = type("tensorrt", (), {"__name__": "tensorrt", "__version__": version})
        return lacking_kinds(Target(Library(trt, False), sm))

    assert of("10.16.2", 87) == {"fp4", "fp8"}
    assert of("10.16.2", 89) == {"fp4"}
    assert of("10.16.2", 110) == set()
    assert of("10.3.0", 110) == {"fp4", "fp8 blocks"}
    assert of("10.8.0", 110) == {"fp8 blocks"}


def test_llm_build_replaces_unsupported_weights_on_request(command_here, bundles, tmp_path):
    pytest.importorskip("tensorrt_rtx", reason="compiled with it: pip install '.[tensorrt-rtx]'")
    flags = (
        "--onnxDir",
        bundles.make("base", "nvfp4"),
        "--engineDir",
        tmp_path / "engine",
        "--maxInputLen",
        INPUT,
        "--maxKVCacheCapacity",
        CAPACITY,
        "--backend",
        "tensorrt",
        "--gpu",
        "8.9",
    )
    refused = command_here("llm_build", *flags)
    assert_one_line_error(refused, "NVFP4 needs a GPU", "--fallbackPrecision int4 or fp16")
    odd = command_here("llm_build", *flags, "--fallbackPrecision", "int3")
    assert_one_line_error(odd, "--fallbackPrecision int3: give int4 or fp16")
    predicted = command_here("llm_build", *flags, "--fallbackPrecision", "int4", "--dryRun")
    assert predicted.returncode == 0, predicted.stderr
    built = command_here("llm_build", *flags, "--fallbackPrecision", "int4")
    assert built.returncode == 0, built.stderr
    assert "note: decoder: fp4 weights are int4 here" in built.stderr
    manifest = load_engine(tmp_path / "engine", LLM_ENGINE)
    assert {graph.precision for graph in manifest.main_graphs} == {"int4"}
    assert "fallback.data" not in {path.name for path in (tmp_path / "engine").iterdir()}
