"""`--verify` of quantized checkpoints: transformers with what the codes stand for."""

from __future__ import annotations

import re

import pytest
from conftest import make_checkpoint
from quantized_layouts import LAYOUTS, write_checkpoint
from safetensors.numpy import load_file, save_file

from edgellm.contract import EdgeLLMError
from edgellm.export import models
from edgellm.export.bundle import ExportOptions, export_llm
from edgellm.export.source import open_checkpoint
from edgellm.export.verify import verify_bundle

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("floats")
    return {kind: make_checkpoint(folder / kind, **models.find(kind).TINY)
            for kind in ("qwen3", "qwen3_moe")}  # fmt: skip


def exported(source, folder, layout):
    write_checkpoint(source, folder / "checkpoint", LAYOUTS[layout])
    checkpoint = open_checkpoint(str(folder / "checkpoint"))
    return checkpoint, export_llm(checkpoint, folder / "bundle", ExportOptions("fp32"))


def difference(verdict):
    return float(re.search(r"logit difference ([^,]+),", verdict)[1])


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("qwen3", name) for name in ("int4", "fp8", "awq", "gptq-order", "ct-int4", "w8a16")]
    + [("qwen3_moe", "awq"), ("qwen3_moe", "ct-fp8")],
)
def test_the_graph_computes_what_the_codes_stand_for(kind, layout, floats, tmp_path):
    checkpoint, manifest = exported(floats[kind], tmp_path, layout)
    verdict = verify_bundle(checkpoint, tmp_path / "bundle", manifest)
    assert difference(verdict) < 2e-3
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "bundle"}


def test_other_scales_are_seen(floats, tmp_path):
    _, manifest = exported(floats["qwen3"], tmp_path, "w8a16")
    path = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight_scale"] *= 1.5
    save_file(tensors, path, metadata={"format": "pt"})
    again = open_checkpoint(str(tmp_path / "checkpoint"))
    assert difference(verify_bundle(again, tmp_path / "bundle", manifest)) > 0.01


def test_what_nobody_decodes_is_said(floats, tmp_path):
    checkpoint, manifest = exported(floats["qwen3"], tmp_path, "nvfp4")
    with pytest.raises(EdgeLLMError, match="Runtime does not decode the weights of model"):
        verify_bundle(checkpoint, tmp_path / "bundle", manifest)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "bundle"}
