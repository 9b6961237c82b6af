"""Training with a quantized base: dequantized weights in torch."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import make_checkpoint
from quantized_layouts import LAYOUTS, write_checkpoint
from safetensors.torch import load_file, save_file

from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.export import models
from edgellm.tools.train_draft.base import load_base

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized") / "base"
    tiny = models.find("llama").TINY
    return make_checkpoint(folder, **{**tiny, "num_hidden_layers": 2, "tie_word_embeddings": True})


@pytest.fixture(autouse=True)
def whole_floats(monkeypatch):
    """Compute in float32, since bfloat16 would hide small errors."""
    monkeypatch.setattr("edgellm.tools.train_draft.base.compute_dtype", lambda _: torch.float32)


@pytest.mark.parametrize("layout", ["int4", "fp8", "int8_sq", "nvfp4"])
def test_quantized_layers_are_dequantized(floats, tmp_path, layout):
    expected = write_checkpoint(floats, tmp_path / layout, LAYOUTS[layout])
    model = load_base(str(tmp_path / layout), CPU).model
    weights = model.state_dict()
    for name, weight in expected.items():
        np.testing.assert_allclose(weights[name].numpy(), weight, rtol=1e-6, atol=1e-7)
    original = load_file(floats / "model.safetensors")
    for name in original.keys() - expected.keys():
        assert torch.equal(weights[name], original[name].float())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_quantized_head_is_not_tied_to_the_embedding(floats, tmp_path):
    folder = shutil.copytree(floats, tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"].float().numpy()
    stored, expected = LAYOUTS["int4"].writer(embedding, np.random.default_rng(0))
    head = {f"lm_head.{part}": torch.from_numpy(array) for part, array in stored.items()}
    save_file({**tensors, **head}, folder / "model.safetensors", metadata={"format": "pt"})
    described = {"quantization": {"quant_algo": "W4A16_AWQ"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(described))
    base = load_base(str(folder), CPU)
    np.testing.assert_allclose(base.head.numpy(), expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(base.embedding, tensors["model.embed_tokens.weight"].float())


def test_unsupported_and_damaged_layouts_are_rejected(floats, tmp_path):
    write_checkpoint(floats, tmp_path / "gptq", LAYOUTS["gptq"])
    with pytest.raises(UnsupportedModelError, match="is quantized by gptq") as found:
        load_base(str(tmp_path / "gptq"), CPU)
    assert "edgellm-quantize" in found.value.hint
    folder = tmp_path / "int4"
    write_checkpoint(floats, folder, LAYOUTS["int4"])
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight_scale"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BrokenArtifactError, match=r"layers\.1\.mlp\.up_proj\.weight_scale"):
        load_base(str(folder), CPU)
