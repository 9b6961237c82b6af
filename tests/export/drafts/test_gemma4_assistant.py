"""Gemma 4's assistants against transformers: the portable graph and the engine, wrong folders."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_checkpoint
from gemma4_assistants import (
    BASE,
    CLUSTERS,
    FULL,
    HIDDEN,
    SLIDING,
    TEXT,
    VOCAB,
    Oracle,
    make_assistant,
    make_base,
)
from safetensors.torch import load_file, save_file

from edgellm.build.engine import build_engine
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import DRAFT_BUNDLE, DRAFT_ENGINE, Bundle, load_bundle, load_engine
from edgellm.device_runtime.networks.draft import DraftNetwork, open_draft
from edgellm.device_runtime.runners.onnxruntime_cpu.runner import LoadedGraph, OnnxRuntimeRunner
from edgellm.device_runtime.runners.onnxruntime_graphs import GraphOptions, load_graph
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.open_checkpoint import open_draft as open_folder

K, CAPACITY, TOLERANCE = 6, 64, 2e-4
PLAN = Plan(
    max_input_len=32, kv_capacity=CAPACITY, threads=1, quantize="none", max_draft_tree_size=8
)
HEADS = {"plain": {}, "clusters": CLUSTERS}
pytestmark = pytest.mark.usefixtures("one_thread")


def exported(draft: Path, base: Path, bundle: Path, dtype: str = "fp32") -> Bundle:
    checkpoints = open_folder(str(draft)), open_checkpoint(str(base), tokenizer=False)
    export_draft(*checkpoints, bundle, DraftOptions(dtype))
    return load_bundle(bundle, DRAFT_BUNDLE)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def assistant(tmp_path_factory) -> Path:
    return make_assistant(tmp_path_factory.mktemp("assistant") / "assistant")


def portable(bundle: Path, manifest: Bundle) -> DraftNetwork:
    spec = manifest.draft.decoder
    graphs = [LoadedGraph(load_graph(bundle / "model.onnx", GraphOptions(threads=1)))]
    runner = OnnxRuntimeRunner(graphs=graphs, kv=spec.kv, capacity=CAPACITY)
    return DraftNetwork(runner=runner, fuse=None, spec=spec, capacity=CAPACITY)


def engine(bundle: Path, folder: Path, kernels: str) -> DraftNetwork:
    plan = dataclasses.replace(PLAN, options=CpuOptions(kernels))
    build_engine("draft", bundle, folder, plan, "onnxruntime", lambda _: None)
    return open_draft(folder / "draft", load_engine(folder / "draft", DRAFT_ENGINE))


def drive(network: DraftNetwork, oracle: Oracle, taps: tuple[int, ...]) -> None:
    """A text in two chunks, longer than the window; then two levels of drafted tokens."""
    ids = np.random.default_rng(3).integers(9, VOCAB, 31)
    hidden = oracle.read(ids.tolist(), taps)
    rows, found = len(ids) - 1, []
    for first, last in ((0, 19), (19, rows)):
        own = np.arange(last - first)
        given = ids[first + 1 : last + 1], hidden[first:last].numpy()
        found.append(network.run(*given, first, own, top_k=K).copy())
    for row in (0, 5, 11, 12, 13, 18, 19, rows - 1):
        step = oracle.step(int(ids[row + 1]), hidden[row, -HIDDEN:], row + 1)
        equal(found[row >= 19], row - 19 * (row >= 19), step)
    newest = step
    nodes = torch.topk(newest.log_probs, 2).indices.tolist()
    for _ in range(2):
        above = torch.zeros(2, hidden.shape[1])
        above[:, -HIDDEN:] = newest.hidden
        result = network.run(
            np.array(nodes),
            above.numpy(),
            rows,
            np.arange(2),
            top_k=K,
            position_ids=np.full(2, rows - 1),
            tree_mask=np.zeros((2, 2), np.bool_),
        )
        steps = [oracle.step(node, newest.hidden, rows) for node in nodes]
        for place, step in enumerate(steps):
            equal(result, place, step)
        newest = steps[1]


def equal(found, row: int, step) -> None:
    best = step.log_probs.topk(K)
    np.testing.assert_array_equal(found.token_ids[row], best.indices)
    np.testing.assert_allclose(found.log_probs[row], best.values, atol=TOLERANCE)
    np.testing.assert_allclose(found.hidden[row, -HIDDEN:], step.hidden, atol=TOLERANCE)
    assert not found.hidden[row, :-HIDDEN].any()


@pytest.mark.each_change("edgellm-*", "portable-plain", "onnxruntime-clusters")
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("where", ["portable", "edgellm", "onnxruntime"])
def test_steps_equal_transformers(base, tmp_path, where, head):
    draft = make_assistant(tmp_path / "draft", **HEADS[head])
    manifest = exported(draft, base, tmp_path / "bundle")
    spec = manifest.draft
    assert (spec.method, spec.hidden_taps) == ("gemma4_assistant", (2, 3, 6))
    assert (spec.fuses, spec.draft_vocab_size) == (False, 24 if head == "clusters" else VOCAB)
    assert spec.decoder.kv.heads == ((2, 32), (2, 48))
    own = load_file(draft / "model.safetensors")
    counted = sum(each.numel() for name, each in own.items() if "ordering" not in name)
    assert spec.decoder.num_parameters == counted
    bundle = tmp_path / "bundle"
    is_portable = where == "portable"
    network = portable(bundle, manifest) if is_portable else engine(bundle, tmp_path / "e", where)
    drive(network, Oracle(base, draft), spec.hidden_taps)


def test_a_base_without_shared_layers_gives_its_last_ones(tmp_path):
    """As 26B-A4B and 31B: keys are values in global layers."""
    changes = {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    }
    base = make_base(tmp_path / "base", **changes)
    heads = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    draft = make_assistant(tmp_path / "draft", text={**TEXT, **heads})
    manifest = exported(draft, base, tmp_path / "bundle")
    assert manifest.draft.hidden_taps == (4, 5, 6)
    assert manifest.draft.decoder.kv.heads == ((2, 32), (1, 48))
    network = portable(tmp_path / "bundle", manifest)
    drive(network, Oracle(base, draft), manifest.draft.hidden_taps)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("where", ["portable", "edgellm"])
def test_steps_with_gemma_4_12b_equal_transformers(tmp_path, where, head):
    """Its config omits layers' embeddings, and has other defaults."""
    base = make_base(tmp_path / "base", "gemma4_unified")
    draft = make_assistant(tmp_path / "draft", "gemma4_unified", **HEADS[head])
    manifest = exported(draft, base, tmp_path / "bundle")
    spec, bundle = manifest.draft, tmp_path / "bundle"
    assert (spec.method, spec.hidden_taps) == ("gemma4_assistant", (2, 3, 6))
    assert spec.decoder.kv.heads == ((2, 32), (1, 48))
    is_portable = where == "portable"
    network = portable(bundle, manifest) if is_portable else engine(bundle, tmp_path / "e", where)
    drive(network, Oracle(base, draft), spec.hidden_taps)


def test_defaults_of_gemma_4_12b(tmp_path):
    """Another base's hidden size is rejected."""
    draft = make_assistant(tmp_path / "draft", "gemma4_unified")
    path = draft / "config.json"
    config = json.loads(path.read_text())
    config.pop("backbone_hidden_size")
    path.write_text(json.dumps(config))
    base = make_base(tmp_path / "base", "gemma4_unified")
    with pytest.raises(EdgeLLMError, match="for a base of hidden size 3840, this base has 96"):
        exported(draft, base, tmp_path / "bundle")


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_rounded_engines_pass_their_check(base, tmp_path, quantize):
    draft = make_assistant(tmp_path / "draft", **CLUSTERS)
    exported(draft, base, tmp_path / "bundle", "fp16")
    plan = Plan(
        max_input_len=32, kv_capacity=64, threads=1, quantize=quantize, max_draft_tree_size=8
    )
    built = build_engine("draft", tmp_path / "bundle", tmp_path / "e", plan, "onnxruntime", print)
    assert quantize in built.main_graphs[0].precision


CONFIGS = {
    "another base": ({"backbone_hidden_size": 64}, {}, "for a base of hidden size 64, .* has 96"),
    "vocabulary": ({}, {"vocab_size": 90}, "for a base of vocabulary 90, this base has 96"),
    "experts": ({}, {"enable_moe_block": True}, "enable_moe_block = True is not supported"),
    "own keys": ({}, {"num_kv_shared_layers": 2}, "num_kv_shared_layers = 2 is not supported"),
    "centroids": ({**CLUSTERS, "num_centroids": 13}, {}, "num_centroids = 13 .* do not fit"),
    "many clusters": (
        {**CLUSTERS, "centroid_intermediate_top_k": 13},
        {},
        "_top_k = 13 do not fit",
    ),
    "rope": (
        {},
        {
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 9} for kind in (FULL, SLIDING)
            }
        },
        "rope_parameters differ from those of this base",
    ),
    "heads": ({}, {"head_dim": 16}, "layer 0 of the draft reads keys of 2 heads of 16 numbers"),
    "unknown key": ({"centroid_bias": 1}, {}, "does not understand: centroid_bias"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_other_configs_are_rejected(base, assistant, tmp_path, name):
    outer, text, message = CONFIGS[name]
    draft = shutil.copytree(assistant, tmp_path / "draft")
    path = draft / "config.json"
    config = json.loads(path.read_text())
    saved = config["text_config"]
    if "head_dim" in text:
        saved.pop("per_layer_config", None)
    path.write_text(json.dumps({**config, **outer, "text_config": {**saved, **text}}))
    with pytest.raises(EdgeLLMError, match=message):
        exported(draft, base, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_other_bases_and_tensors_are_rejected(base, assistant, tmp_path, tiny_checkpoint):
    with pytest.raises(EdgeLLMError, match="for a base of Gemma 4, this base is another model"):
        exported(assistant, tiny_checkpoint, tmp_path / "bundle")
    unified = make_assistant(tmp_path / "unified", "gemma4_unified")
    with pytest.raises(EdgeLLMError, match="for a base of Gemma 4 12B, this base is another"):
        exported(unified, base, tmp_path / "bundle")
    with pytest.raises(EdgeLLMError, match="is a draft, not a base"):
        exported(assistant, assistant, tmp_path / "bundle")
    whole = make_checkpoint(
        tmp_path / "whole", **{**BASE, "layer_types": [FULL] * 6, "num_kv_shared_layers": 0}
    )
    with pytest.raises(EdgeLLMError, match="attention in windows, which this base lacks"):
        exported(assistant, whole, tmp_path / "bundle")
    draft = make_assistant(tmp_path / "draft", **CLUSTERS)
    tensors = load_file(draft / "model.safetensors")
    tensors["masked_embedding.token_ordering"][3] = VOCAB
    save_file(tensors, draft / "model.safetensors", {"format": "pt"})
    with pytest.raises(EdgeLLMError, match="token_ordering does not name each token once"):
        exported(draft, base, tmp_path / "bundle")
    tensors.pop("pre_projection.weight")
    save_file(tensors, draft / "model.safetensors", {"format": "pt"})
    with pytest.raises(EdgeLLMError, match="is not a draft"):
        exported(draft, base, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
