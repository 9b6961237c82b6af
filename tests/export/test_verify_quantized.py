"""`--verify` of quantized checkpoints: transformers with what the codes stand for."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
from conftest import make_checkpoint
from quantized_layouts import LAYOUTS, write_checkpoint
from safetensors.numpy import load_file, save_file

from edgellm.export import models
from edgellm.export.bundle import ExportOptions, export_llm
from edgellm.export.source import open_checkpoint
from edgellm.export.verify import verify_bundle

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("floats")
    return {kind: make_checkpoint(folder / kind, **models.find(kind).TINY)
            for kind in ("qwen3", "qwen3_moe", "granitemoe")}  # fmt: skip


def with_experts_apart(source, folder):
    """Granite's experts as quantizers write them: three layers of each."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if "block_sparse_moe" in name and "_linear" in name]:
        mlp, _, layer = name.removesuffix(".weight").rpartition(".")
        for expert, stack in enumerate(tensors.pop(name)):
            parts = {"input_linear": ("gate", "up"), "output_linear": ("down",)}[layer]
            for part, weight in zip(parts, np.split(stack, len(parts)), strict=True):
                own = f"{mlp}.experts.{expert}.{part}_proj.weight"
                tensors[own] = np.ascontiguousarray(weight)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def exported(source, folder, layout):
    if source.name == "granitemoe":
        source = with_experts_apart(source, folder / "apart")
    write_checkpoint(source, folder / "checkpoint", LAYOUTS[layout])
    checkpoint = open_checkpoint(str(folder / "checkpoint"))
    return checkpoint, export_llm(checkpoint, folder / "bundle", ExportOptions("fp32"))


def difference(verdict):
    return float(re.search(r"logit difference ([^,]+),", verdict)[1])


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("qwen3", name) for name in ("int4", "fp8", "awq", "gptq-order", "ct-int4", "w8a16", "nvfp4")]
    + [("qwen3_moe", "awq"), ("qwen3_moe", "ct-nvfp4"), ("granitemoe", "ct-fp8")],
)
def test_the_graph_computes_what_the_codes_stand_for(kind, layout, floats, tmp_path):
    checkpoint, manifest = exported(floats[kind], tmp_path, layout)
    verdict = verify_bundle(checkpoint, tmp_path / "bundle", manifest)
    assert difference(verdict) < 2e-3
    assert {path.name for path in tmp_path.iterdir()} - {"apart"} == {"checkpoint", "bundle"}


def test_other_scales_are_seen(floats, tmp_path):
    _, manifest = exported(floats["qwen3"], tmp_path, "w8a16")
    path = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight_scale"] *= 1.5
    save_file(tensors, path, metadata={"format": "pt"})
    again = open_checkpoint(str(tmp_path / "checkpoint"))
    assert difference(verify_bundle(again, tmp_path / "bundle", manifest)) > 0.01
