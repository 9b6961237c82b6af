"""Layer reports from the output of an engine's inspector."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from edgellm.build.tensorrt import builder
from edgellm.build.tensorrt.builder import Built
from edgellm.build.tensorrt.engine_layers import inspect_engine, read_layers
from edgellm.build.tensorrt.layer_report import notes_of, write_report
from edgellm.build.tensorrt.profiles import Pass
from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
)
from edgellm.tools.inspection.report import Fusion
from edgellm.tools.inspection.sources.trt_layers import fusions_of

PASSES = [Pass("decode", 1, {}), Pass("prefill", 48, {})]


def tensor(name: str, dims: list[int], dtype: str) -> dict:
    return {"Name": name, "Dimensions": dims, "Datatype": dtype, "Format": "Row major linear"}


def layer(name: str, kind: str, inputs=(), constants=(), outputs=(), nodes=(), tactic="") -> dict:
    said = "\x1e".join(f"[ONNX Layer: {node}]" for node in nodes)
    return {
        "Name": name,
        "LayerType": kind,
        "Inputs": list(inputs),
        "Constants": list(constants),
        "Outputs": list(outputs),
        "TacticName": tactic,
        "StreamId": 0,
        "Metadata": said,
    }


X, Y = tensor("x", [1, 1, 64], "Half"), tensor("y", [1, 1, 64], "Half")
INT4 = layer(
    "__myl_ReplCastMulFc_myl0_1",
    "kgen",
    [X],
    [tensor("s", [1, 2, 64], "Half"), tensor("w", [1, 64, 64], "Int4")],
    [Y],
    ["lowered.MatMul_3"],
)
FP8 = layer(
    "lowered.MatMul_4_myl0_2",
    "gemm",
    [tensor("x", [1, 1, 64], "FP8")],
    [tensor("w", [1, 64, 64], "FP8")],
    [Y],
    ["lowered.MatMul_4"],
)
NEWER = [
    layer("shape_myl0_0", "shape_call"),
    INT4,
    FP8,
    layer("lowered.store_rows_7", "PluginV3", [X], (), [Y]),
    layer("lowered.attend_8", "PluginV3", [X], (), [Y]),
    layer("lowered.combine_9", "PluginV3", [X], (), [Y]),
    layer(
        "Reformatting CopyNode for Input Tensor 0 to lowered.attend_8 [profile 1]",
        "Reformat",
        [X],
        (),
        [Y],
    ),
    {**INT4, "Name": "__myl_ReplCastMulFc_myl1_1 [profile 1]"},
    {**layer("__myl_Mha_myl1_2", "kgen", [X], (), [Y], ["Attention"], "fmha_v2_flash_fp16")},
    layer(
        "lowered.MatMul_5_myl1_3",
        "kgen",
        [X],
        [tensor("w", [1, 64, 64], "Int4")],
        [tensor("w2", [1, 64, 64], "Half")],
        ["lowered.DequantizeLinear_5"],
    ),
]


def old_tensor(name: str, dims: list[int], said: str) -> dict:
    return {"Name": name, "Location": "Device", "Dimensions": dims, "Format/Datatype": said}


OLDER = [  # as 10.3 reports
    {
        "Name": "lowered.MatMul_2",
        "LayerType": "CaskGemmMatrixMultiply",
        "Inputs": [old_tensor("x", [1, 64], "Row major linear INT8 format")],
        "Outputs": [old_tensor("y", [1, 32], "Row major linear FP16 format (kLINEAR)")],
        "Weights": {"Type": "Int8", "Count": 2048},
        "TacticName": "sm80_xmma_gemm_i8i32",
        "StreamId": 0,
        "Metadata": "[ONNX Layer: lowered.MatMul_2]",
    },
    {
        "Name": "Reformatting CopyNode for Output Tensor 0",
        "LayerType": "Reformat",
        "Inputs": [old_tensor("y", [1, 32], "Half")],
        "Outputs": [old_tensor("z", [1, 32], "Row major linear FP32")],
        "StreamId": 0,
        "Metadata": "",
    },
]


def _built(layers: list, attentions: int = 0, own: int = 0) -> Built:
    kernels = read_layers(json.dumps({"Layers": layers, "Bindings": ["x"]}))
    return Built(
        kernels=kernels,
        caches={},
        attentions=attentions,
        own_attentions=own,
        told_by="the engine's inspector",
    )


def _fusions(folder, built: Built) -> tuple[Fusion, ...]:
    write_report(folder, "llm", PASSES, built)
    (found,) = fusions_of(folder, SimpleNamespace(files={"llm.layers.json": None}))  # type: ignore[arg-type]
    assert (found.graph, found.told_by) == ("llm", "the engine's inspector")
    return found.passes


def test_layers_of_newer_versions_are_counted(tmp_path):
    decode, prefill = _fusions(tmp_path, built := _built(NEWER, attentions=2, own=1))
    assert decode == Fusion(
        name="decode",
        kernels=5,
        attention="1 edgellm's kernels",
        products={"Int4": 1, "FP8 x FP8": 1},
        reformats=0,
        decoded_weights=0,
    )
    assert prefill == Fusion(
        name="prefill",
        kernels=4,
        attention="1 TensorRT's, fused",
        products={"Int4": 1},
        reformats=1,
        decoded_weights=1,
    )
    assert notes_of(built, PASSES) == (
        "decode: 0 of 2 attentions are one kernel",
        "prefill: 1 of 2 attentions are one kernel",
        "prefill: 0 of 1 attentions are edgellm's kernels",
        "prefill: 1 tensors are copied into other layouts",
    )


def test_layers_of_older_versions_are_counted(tmp_path):
    decode, prefill = _fusions(tmp_path, built := _built(OLDER))
    assert decode == Fusion(
        name="decode",
        kernels=2,
        attention="none in one kernel",
        products={"Int8 x Int8": 1},
        reformats=1,
        decoded_weights=0,
    )
    assert prefill.kernels == 0
    assert [each.dtype for each in built.kernels[1].outputs] == ["Float"]


@pytest.mark.parametrize("text", ["", "[]", '{"Layers": ["names", "only"]}', '{"Layers": [{}]}'])
def test_an_inspector_without_layers_is_reported(text):
    with pytest.raises(EdgeLLMError, match="inspector does not list the layers") as caught:
        read_layers(text)
    assert "--layerReport" in caught.value.hint


@pytest.mark.parametrize("text", ["", "[]", '{"told_by": "x"}', '{"told_by": "x", "passes": [1]}'])
def test_a_damaged_layer_report_is_rejected(tmp_path, text):
    (tmp_path / "llm.layers.json").write_text(text)
    manifest = SimpleNamespace(files={"llm.layers.json": None})
    with pytest.raises(BrokenArtifactError, match=r"llm\.layers\.json is not a report of layers"):
        fusions_of(tmp_path, manifest)  # type: ignore[arg-type]


def _library(text: str | None, said: list) -> SimpleNamespace:
    """A fake TensorRT with a GPU; the inspector of a loaded engine returns `text`."""

    class Logger:
        def __init__(self) -> None:
            pass

    severity = SimpleNamespace(ERROR=1, INTERNAL_ERROR=2, WARNING=3)
    logger = type("ILogger", (Logger,), {"Severity": severity})
    inspector = SimpleNamespace(get_engine_information=lambda kind: said.append(kind) or text)
    engine = SimpleNamespace(create_engine_inspector=lambda: inspector)

    def load(plan) -> object:
        said.append(bytes(plan))
        if text is None:
            log.log(1, "out of\nmemory")
        return engine if text is not None else None

    def runtime(given) -> object:
        nonlocal log
        log = given
        return SimpleNamespace(deserialize_cuda_engine=load)

    log = None
    return SimpleNamespace(
        ILogger=logger,
        Runtime=runtime,
        __version__="10.16.2",
        __name__="tensorrt",
        LayerInformationFormat=SimpleNamespace(JSON="json"),
    )


def test_layers_are_read_from_the_engine_inspector(tmp_path):
    said: list = []
    (tmp_path / "llm.engine").write_bytes(b"plan")
    text = json.dumps({"Layers": NEWER})
    assert len(inspect_engine(_library(text, said), tmp_path / "llm.engine")) == 9
    assert said == [b"plan", "json"]
    with pytest.raises(EdgeLLMError, match="cannot load the engine to list its layers: out of mem"):
        inspect_engine(_library(None, said), tmp_path / "llm.engine")


def test_only_full_tensorrt_loads_the_engine_for_a_report(monkeypatch):
    """TensorRT's engines are inspected for a report; TensorRT-RTX's cannot be loaded here."""
    asked = []
    monkeypatch.setattr(builder, "inspect_engine", lambda _, path: asked.append(path) or ())
    log = SimpleNamespace(layers="")
    for ahead, wanted in ((False, True), (True, True), (False, False)):
        target = SimpleNamespace(library=SimpleNamespace(is_ahead_of_time=ahead, trt=None))
        options = builder.TensorRtOptions(layer_report=wanted)
        builder._kernels(log, target, options, f"{ahead}{wanted}", lambda _: None)
    assert asked == ["FalseTrue"]
