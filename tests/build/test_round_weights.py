"""`llm_build --quantize int4`: float weights rounded on the device."""

from __future__ import annotations

import numpy as np
import torch
from conftest import make_checkpoint

from edgellm.build.engine import build_engine
from edgellm.contract import EngineManifest, load_manifest
from edgellm.device_runtime import backends
from edgellm.device_runtime.backends import Plan
from edgellm.device_runtime.backends.onnxruntime.round_weights import nearest_int4
from edgellm.export import models
from edgellm.export.bundle import ExportOptions, export_llm
from edgellm.export.source import open_checkpoint

IDS = np.random.default_rng(4).integers(9, 96, 20)


def test_rounding_at_build_time(tmp_path):
    """--quantize int4 gives the engine of a model whose weights were rounded before."""
    from transformers import AutoModelForCausalLM

    tiny = {**models.find("llama").TINY, "intermediate_size": 96, "tie_word_embeddings": False}
    source = make_checkpoint(tmp_path / "float", **tiny)
    export_llm(open_checkpoint(str(source)), tmp_path / "bundle", ExportOptions("fp32"))
    plan = Plan(48, 64, 1, "same", "int4")
    build_engine(tmp_path / "bundle", tmp_path / "engine", plan, "onnxruntime", lambda _: None)
    assert not list((tmp_path / "engine").glob("*rounded*"))
    manifest = load_manifest(tmp_path / "engine", EngineManifest)
    assert [graph.precision for graph in manifest.graphs] == ["int4"]
    session = backends.find("onnxruntime").open_session(tmp_path / "engine", manifest)
    found = session.run(IDS, 0, np.arange(20)).logits
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("_proj.weight", "lm_head.weight")):
                parameter.copy_(torch.from_numpy(_rounded(parameter.numpy())))
        expected = model(torch.from_numpy(IDS)[None]).logits[0].numpy()
    assert np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)) < 0.15


def _rounded(weight: np.ndarray) -> np.ndarray:
    packed, scales = nearest_int4(np.ascontiguousarray(weight.T), 32)
    codes = np.stack([packed & 15, packed >> 4], 1).astype(np.int32).reshape(weight.T.shape)
    return ((codes ^ 8) - 8).T * np.repeat(scales, 32, 0).T


def test_clipping_costs_less_than_none():
    weight = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    blocks = weight.reshape(64, -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / 7
    plain = np.clip(np.rint(blocks / scale), -8, 7) * scale
    errors = np.sum((_rounded(weight).reshape(blocks.shape) - blocks) ** 2, -1)
    assert np.all(errors <= np.sum((plain - blocks) ** 2, -1) + 1e-6)
    assert errors.sum() < 0.95 * np.sum((plain - blocks) ** 2)
