"""MXFP4 and MXFP8 (OCP MX 1.0) of compressed-tensors and ModelOpt, by the format's definition."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_checkpoint
from graph_weights import graph_weights
from quantized_layouts import MICROSCALED, write_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.core.errors import BrokenArtifactError, EdgeLLMError, UnsupportedModelError
from edgellm.core.manifest import LLM_ENGINE, load_engine
from edgellm.device_runtime.networks.decoder import open_decoder
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.verify import run_portable, verify_bundle

IDS = np.array([1, 17, 60, 5, 88, 33])
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def floats(tmp_path_factory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 2}
    folder = tmp_path_factory.mktemp("floats") / "checkpoint"
    return make_checkpoint(folder, **{**models.find("qwen3").TINY, **sizes})


def export(folder: Path, bundle: Path, dtype: str = "fp32"):
    return export_llm(open_checkpoint(str(folder)), bundle, ExportOptions(dtype=dtype))


def changed(folder: Path, name: str, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("layout", MICROSCALED)
def test_weights_and_outputs_are_those_of_the_checkpoint(floats, tmp_path, layout):
    """Logits of transformers with the weights that the codes stand for."""
    meant = write_checkpoint(floats, tmp_path / "checkpoint", MICROSCALED[layout])
    manifest = export(tmp_path / "checkpoint", tmp_path / "bundle")
    found = graph_weights(tmp_path / "bundle")
    assert found.keys() == meant.keys()
    for name, expected in meant.items():
        np.testing.assert_array_equal(found[name], expected)
    checkpoint = open_checkpoint(str(tmp_path / "checkpoint"))
    assert "100.0%" in verify_bundle(checkpoint, tmp_path / "bundle", manifest)
    state = load_file(floats / "model.safetensors")
    state |= {name: torch.from_numpy(value) for name, value in meant.items()}
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(floats))
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        expected = model.float()(torch.from_numpy(IDS)[None]).logits[0].numpy()
    if "fp4" not in layout:  # ONNX Runtime computes no FLOAT4E2M1
        logits = run_portable(tmp_path / "bundle", manifest, IDS, 4)
        np.testing.assert_allclose(logits, expected, atol=2e-4)
    plan = Plan(max_input_len=16, kv_capacity=32, threads=1)
    folder = tmp_path / "engine"
    build_engine("llm", tmp_path / "bundle", folder, plan, "onnxruntime", lambda _: None)
    engine = load_engine(folder, LLM_ENGINE)
    assert engine.main_graphs[0].precision == MICROSCALED[layout].kind
    logits = open_decoder(folder, engine).run(IDS, 0, np.arange(len(IDS))).logits
    error = np.sqrt(np.mean((logits - expected) ** 2) / np.mean(expected**2))
    assert error < (0.15 if "fp4" in layout else 1e-5)  # FP4 with activations in int8


def test_modelopt_dequantizes_to_the_same_weights(floats, tmp_path):
    mxfp8 = pytest.importorskip("modelopt.torch.quantization.qtensor").MXFP8QTensor
    weight = load_file(floats / "model.safetensors")[f"{UP}.weight"]
    codes, scale = mxfp8.quantize(weight)
    expected = codes.dequantize(torch.float32, scale=scale)
    write_checkpoint(floats, tmp_path / "checkpoint", MICROSCALED["mxfp8"])
    for name, value in (("weight", codes._quantized_data), ("weight_scale", scale)):
        changed(tmp_path / "checkpoint", f"{UP}.{name}", lambda _, value=value: value)
    export(tmp_path / "checkpoint", tmp_path / "bundle")
    found = graph_weights(tmp_path / "bundle")[f"{UP}.weight"]
    np.testing.assert_array_equal(found, expected.numpy())


@pytest.mark.parametrize("layout", MICROSCALED)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_groups_of_zeros_may_have_any_exponent(floats, tmp_path, layout, dtype):
    """Writers give them the smallest one, which other groups do not have."""
    folder = tmp_path / "checkpoint"
    write_checkpoint(floats, folder, MICROSCALED[layout])

    def zero(codes: torch.Tensor) -> torch.Tensor:
        codes.view(torch.uint8)[3] = 0
        return codes

    name = f"{UP}.{'weight_packed' if layout == 'ct-mxfp4' else 'weight'}"
    changed(folder, name, zero)
    changed(folder, f"{UP}.weight_scale", lambda scale: scale.index_fill(0, torch.tensor(3), 0))
    export(folder, tmp_path / "bundle", dtype)
    assert not graph_weights(tmp_path / "bundle")[f"{UP}.weight"][3].any()


def test_other_exponents_than_the_graph_holds_are_rejected(floats, tmp_path):
    folder = tmp_path / "checkpoint"
    write_checkpoint(floats, folder, MICROSCALED["ct-mxfp4"])
    changed(folder, f"{UP}.weight_scale", lambda scale: scale.index_fill(0, torch.tensor(3), 90))
    with pytest.raises(UnsupportedModelError, match=r"up_proj.*17 octaves") as caught:
        export(folder, tmp_path / "bundle")
    assert "NVFP4" in caught.value.hint


@pytest.mark.parametrize("layout", MICROSCALED)
def test_exponents_that_are_not_numbers_are_rejected(floats, tmp_path, layout):
    folder = tmp_path / "checkpoint"
    write_checkpoint(floats, folder, MICROSCALED[layout])
    changed(folder, f"{UP}.weight_scale", lambda scale: scale.index_fill(0, torch.tensor(3), 255))
    with pytest.raises(BrokenArtifactError, match="weight_scale holds values that are not numbers"):
        export(folder, tmp_path / "bundle")


def test_another_maker_contradicts_its_config(floats, tmp_path):
    write_checkpoint(floats, tmp_path / "checkpoint", MICROSCALED["ct-mxfp8"])
    path = tmp_path / "checkpoint" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(EdgeLLMError, match="says gptq, but weights are stored in the layout"):
        export(tmp_path / "checkpoint", tmp_path / "bundle")
