"""`--verify` of quantized checkpoints: transformers with dequantized weights."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import assert_one_line_error, make_checkpoint
from model_configs import GEMMA4_EXPERTS
from quantized_layouts import LAYOUTS, write_checkpoint
from safetensors.numpy import load_file, save_file

from edgellm.core.artifact import verify_files
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.export import models
from edgellm.export.checkpoints.int_packing import unpack
from edgellm.export.checkpoints.quantized.modelopt import scalar
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.reference_weights import quantized_names, read_input, read_weight
from edgellm.export.pipeline.verify import verify_bundle

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("floats")
    return {
        kind: make_checkpoint(folder / kind, **models.find(kind).TINY)
        for kind in ("qwen3", "qwen3_moe", "granitemoe")
    } | {"gemma4_text": make_checkpoint(folder / "gemma4_text", **GEMMA4_EXPERTS)}


# Layers of an expert by the last name of the tensor of all experts.
JOINED = {
    "input_linear": ("gate", "up"),
    "output_linear": ("down",),
    "gate_up_proj": ("gate", "up"),
    "down_proj": ("down",),
}


def with_experts_apart(source, folder):
    """Granite's and Gemma's experts as quantizers write them: three layers of each."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name, each in tensors.items() if each.ndim == 3]:
        mlp, _, layer = name.removesuffix(".weight").rpartition(".")
        for expert, stack in enumerate(tensors.pop(name)):
            parts = JOINED[layer]
            for part, weight in zip(parts, np.split(stack, len(parts)), strict=True):
                own = f"{mlp.removesuffix('.experts')}.experts.{expert}.{part}_proj.weight"
                tensors[own] = np.ascontiguousarray(weight)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def exported(source, folder, layout):
    if source.name in ("granitemoe", "gemma4_text"):
        source = with_experts_apart(source, folder / "apart")
    write_checkpoint(source, folder / "checkpoint", LAYOUTS[layout])
    checkpoint = open_checkpoint(str(folder / "checkpoint"))
    return checkpoint, export_llm(checkpoint, folder / "bundle", ExportOptions(dtype="fp32"))


def difference(verdict):
    return float(re.search(r"logit difference ([^,]+),", verdict)[1])


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("qwen3", name) for name in ("int4", "fp8", "awq", "gptq-order", "ct-int4", "w8a16", "nvfp4")]
    + [("qwen3_moe", "awq"), ("qwen3_moe", "ct-nvfp4"), ("granitemoe", "ct-fp8")]
    + [("gemma4_text", "ct-int4")],
)
def test_the_graph_equals_the_dequantized_weights(kind, layout, floats, tmp_path):
    checkpoint, manifest = exported(floats[kind], tmp_path, layout)
    verdict = verify_bundle(checkpoint, tmp_path / "bundle", manifest)
    assert LAYOUTS[layout].rounds or difference(verdict) < 2e-3  # or within the bound
    assert {path.name for path in tmp_path.iterdir()} - {"apart"} == {"checkpoint", "bundle"}


def test_wrong_scales_are_found(floats, tmp_path):
    _, manifest = exported(floats["qwen3"], tmp_path, "w8a16")
    path = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight_scale"] *= 1.5
    save_file(tensors, path, metadata={"format": "pt"})
    again = open_checkpoint(str(tmp_path / "checkpoint"))
    with pytest.raises(EdgeLLMError, match="computes something else") as caught:
        verify_bundle(again, tmp_path / "bundle", manifest)
    assert difference(str(caught.value)) > 0.01


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_oracle_decodes_every_layout(tmp_path, tiny_checkpoint, name):
    """The oracle agrees with the writers of the tests, as does the exporter's reader."""
    meant = write_checkpoint(tiny_checkpoint, tmp_path / "checkpoint", LAYOUTS[name])
    checkpoint = open_checkpoint(str(tmp_path / "checkpoint"))
    tensors, config = checkpoint.tensors, checkpoint.quant_config
    assert quantized_names(tensors) == {key.removesuffix(".weight") for key in meant}
    for key, expected in meant.items():
        layer = key.removesuffix(".weight")
        weight = read_weight(tensors, config, layer, expected.shape)
        smooth = read_input(tensors, layer).smooth
        found = weight if smooth is None else weight * smooth
        np.testing.assert_allclose(found, expected, rtol=3e-7, atol=0)


def _transposed(words, bits):
    return unpack(words, bits).reshape(len(words), -1, 2)[..., ::-1].reshape(len(words), -1)


# Possible errors of the exporter's reader.
MISTAKES = {
    "gptq-asym": ("gptq.stores_less_one", lambda _: False),
    "gptq-v2": ("gptq.stores_less_one", lambda _: True),
    "awq": ("awq._PLACE", (0, 1, 2, 3, 4, 5, 6, 7)),
    "ct-int4-asym": ("compressed_tensors.unpack", _transposed),
    "ct-nvfp4": ("compressed_tensors.scalar", lambda weights, name: 2 * scalar(weights, name)),
    "nvfp4": ("modelopt.scalar", lambda weights, name: 2 * scalar(weights, name)),
}


@pytest.mark.each_change("nvfp4", "gptq-asym", "ct-int4-asym")
@pytest.mark.parametrize("layout", MISTAKES)
def test_verify_finds_a_wrong_decoding(command_here, floats, tmp_path, monkeypatch, layout):
    """The command exits with 2, and the folder is unchanged."""
    bundle, checkpoint = tmp_path / "bundle", tmp_path / "checkpoint"
    write_checkpoint(floats["qwen3"], checkpoint, LAYOUTS[layout])
    arguments = ("llm", "--model_dir", checkpoint, "--output_dir", bundle, "--dtype", "fp32")
    right = command_here("edgellm-export", *arguments, "--verify")
    assert right.returncode == 0, right.stderr
    assert "weights decoded by the definition of" in right.stdout
    before = load_bundle(bundle, LLM_BUNDLE)
    name, mistake = MISTAKES[layout]
    monkeypatch.setattr(f"edgellm.export.checkpoints.quantized.{name}", mistake)
    wrong = command_here("edgellm-export", *arguments, "--verify", "--overwrite")
    assert_one_line_error(wrong, "computes something else", "relative logit error", "limit")
    assert "nothing was written" in wrong.stderr
    assert load_bundle(bundle, LLM_BUNDLE) == before
    verify_files(bundle, before.files)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "bundle"}


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_verify_rejects_weights_that_test_nothing(command_here, tiny_checkpoint, tmp_path, value):
    """Equal logits for all tokens agree by 100 % with any others."""
    checkpoint = Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.embed_tokens.weight"][:] = value
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    arguments = ("llm", "--model_dir", checkpoint, "--output_dir", tmp_path / "bundle", "--verify")
    result = command_here("edgellm-export", *arguments)
    assert result.returncode == 2
    assert not (tmp_path / "bundle").exists()
    assert ("nothing was compared" in result.stderr) == (value == 0)


@pytest.mark.each_change("-fp16", "auto-round-fp16", "fp8-fp32", "int8_sq-fp16")
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("layout", ["", "auto-round", "fp8", "int8_sq"])
def test_bounds_leave_room_for_rounding(floats, tmp_path, dtype, layout):
    """Limits are ten times the measured errors, except for float16 before rounded inputs."""
    checkpoint = floats["qwen3"]
    if layout:
        write_checkpoint(checkpoint, tmp_path / "checkpoint", LAYOUTS[layout])
        checkpoint = tmp_path / "checkpoint"
    opened = open_checkpoint(str(checkpoint))
    manifest = export_llm(opened, tmp_path / "bundle", ExportOptions(dtype=dtype))
    verdict = verify_bundle(opened, tmp_path / "bundle", manifest)
    error, limit = re.search(r"relative logit error (\S+) \(limit (\S+)", verdict).groups()
    rounds_halves = dtype == "fp16" and LAYOUTS[layout].rounds if layout else False
    assert float(error) * (3 if rounds_halves else 5) < float(limit)
