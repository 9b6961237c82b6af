"""Medusa heads: all public layouts against torch, and rejected ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import assert_one_line_error, make_checkpoint
from eagle_reference import BASE_HIDDEN, BASE_LAYERS, VOCAB
from medusa_heads import add_to_model, log_probs, make_heads, make_tensors

from edgellm.core import graph_io
from edgellm.core.artifact import verify_files
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import DRAFT_BUNDLE, LLM_BUNDLE, Bundle, load_bundle
from edgellm.export import models
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft

BASE = {**models.find("llama").TINY, "num_hidden_layers": BASE_LAYERS}
K = 6


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("medusa_base"), **BASE)


def _exported(draft: Path, base: Path, bundle: Path, dtype: str = "fp32") -> Bundle:
    checkpoints = open_draft(str(draft)), open_checkpoint(str(base), tokenizer=False)
    export_draft(*checkpoints, bundle, DraftOptions(dtype))
    manifest = load_bundle(bundle, DRAFT_BUNDLE)
    verify_files(bundle, manifest.files)
    return manifest


def _run(bundle: Path, feature: torch.Tensor, dtype: type = np.float32) -> list[np.ndarray]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(
        bundle / "model.onnx", options, providers=["CPUExecutionProvider"]
    )
    names = graph_io.CANDIDATE_IDS, graph_io.CANDIDATE_LOG_PROBS
    feed = {
        graph_io.HIDDEN_TAPS: feature.numpy().astype(dtype)[None, None],
        graph_io.TOP_K: np.array([K]),
    }
    return [output[0] for output in session.run(names, feed)]


LAYOUTS = {  # file, prefix, heads, blocks, config
    "pt": ("medusa_lm_head.pt", "", 3, 1, {}),
    "safetensors": ("medusa_lm_head.safetensors", "", 2, 2,
                    {"medusa_num_heads": 2, "medusa_num_layers": 2, "version": "2"}),
    "prefixed": ("model.safetensors", "medusa_head.", 3, 1, {}),
    "modelopt": ("model.safetensors", "medusa_heads.", 3, 1, {}),
    "no_blocks": ("medusa_lm_head.pt", "", 3, 0, {"medusa_num_layers": 0}),
    "config_names_two_of_three": ("medusa_lm_head.pt", "", 3, 1, {"medusa_num_heads": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_graphs_equal_torch(base, tmp_path, name):
    file, prefix, heads, blocks, config = LAYOUTS[name]
    tensors = make_tensors(heads, blocks, prefix=prefix)
    draft = make_heads(tmp_path / "draft", tensors, file, **config)
    manifest = _exported(draft, base, tmp_path / "bundle")
    spec = manifest.draft
    assert (spec.method, spec.num_heads, spec.hidden_taps) == ("medusa", heads, (BASE_LAYERS,))
    assert (spec.fuses, spec.decoder.kv.num_layers, spec.draft_vocab_size) == (False, 0, VOCAB)
    assert spec.decoder.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    assert set(manifest.files) == {"model.onnx", "model.weights"}
    said = manifest.provenance["exporter"], manifest.provenance["hidden_taps"]
    assert said[0] == ("ModelOpt" if name == "modelopt" else "FasterDecoding")
    assert ("all 3 heads" in said[1]) is (name == "config_names_two_of_three")
    feature = torch.randn(BASE_HIDDEN, generator=torch.Generator().manual_seed(1)) * 2
    bare = {key.removeprefix(prefix): value for key, value in tensors.items()}
    best = log_probs(bare, feature, heads, blocks).topk(K)
    ids, found = _run(tmp_path / "bundle", feature)
    np.testing.assert_array_equal(ids, best.indices)
    np.testing.assert_allclose(found, best.values, atol=2e-5)


def test_float16_heads_are_close_to_torch(base, tmp_path):
    tensors = make_tensors()
    _exported(make_heads(tmp_path / "draft", tensors), base, tmp_path / "bundle", "fp16")
    feature = torch.randn(BASE_HIDDEN, generator=torch.Generator().manual_seed(1))
    ids, found = _run(tmp_path / "bundle", feature, np.float16)
    expected = log_probs(tensors, feature, 3, 1).numpy()
    np.testing.assert_allclose(found, np.take_along_axis(expected, ids, 1), atol=0.02)


def test_heads_in_the_folder_of_their_model_are_found(base, tmp_path, command_here):
    """Medusa-2 trains the model, too: base and heads come from one folder."""
    whole = shutil.copytree(base, tmp_path / "whole")
    tensors = make_tensors(prefix="medusa_head.")
    add_to_model(whole, tensors, medusa_num_heads=3, medusa_num_layers=1)
    assert _exported(whole, whole, tmp_path / "draft").draft.num_heads == 3
    with pytest.raises(EdgeLLMError, match="holds more than Medusa heads"):
        _exported(whole, base, tmp_path / "other")
    arguments = ("--model_dir", whole, "--draft_model_dir", whole, "--output_dir", tmp_path / "b")
    result = command_here("edgellm-export", "llm", *arguments)
    assert result.returncode == 0, result.stderr
    assert load_bundle(tmp_path / "b", LLM_BUNDLE).hidden_taps == (BASE_LAYERS,)
    # In a file of their own they are found as well.
    apart = shutil.copytree(base, tmp_path / "apart")
    torch.save(make_tensors(), apart / "medusa_lm_head.pt")
    assert _exported(apart, apart, tmp_path / "draft2").draft.num_heads == 3


def _without(*names: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in make_tensors().items() if name not in names}


FAULTS = {
    "a head is missing": (_without("1.0.linear.weight", "1.0.linear.bias", "1.1.weight"), {},
                          ("of 3 Medusa heads, 2 have an output layer",)),
    "an output is missing": (_without("2.1.weight"), {}, ("2 have an output layer",)),
    "a bias is missing": (_without("1.0.linear.bias"), {}, ("no tensor 1.0.linear.bias",)),
    "too few": (make_tensors(2), {}, ("medusa_num_heads = 3, but the weights hold 2",)),
    "other blocks": (None, {"medusa_num_layers": 2}, ("medusa_num_layers = 2",)),
    "uneven": ({**make_tensors(2), **{f"2.{name[2:]}": tensor for name, tensor in
                make_tensors(1, 2).items()}}, {}, ("different numbers of blocks",)),
    "two prefixes": ({**make_tensors(), **make_tensors(prefix="medusa_head.")}, {},
                     ("have several prefixes",)),
    "unknown tensor": ({**make_tensors(), "sequential_head.weight": torch.ones(2, 2)}, {},
                       ("holds more than Medusa heads: sequential_head.weight",)),
    "a shape": ({**make_tensors(), "1.0.linear.weight": torch.ones(96, 95)}, {},
                ("tensor 1.0.linear.weight has shape [96, 95]",)),
    "vocabulary": ({**make_tensors(1), "0.1.weight": torch.ones(95, 96)}, {"medusa_num_heads": 1},
                   ("a base of vocabulary 95, this base has 96",)),
    "width": ({**make_tensors(1), "0.1.weight": torch.ones(96, 64)}, {"medusa_num_heads": 1},
              ("a base of hidden size 64, this base has 96",)),
    "unknown key": (None, {"tied_heads": True}, ("does not understand: tied_heads",)),
    "version": (None, {"version": "3"}, ("version = '3' is not supported",)),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_unknown_layouts_are_rejected(base, tmp_path, name):
    tensors, config, fragments = FAULTS[name]
    draft = make_heads(tmp_path / "draft", tensors, **config)
    with pytest.raises(EdgeLLMError) as caught:
        _exported(draft, base, tmp_path / "bundle")
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert not (tmp_path / "bundle").exists()


def test_export_draft_writes_medusa_heads(base, tmp_path, command, command_here):
    heads = make_heads(tmp_path / "heads")

    export = "edgellm-export", "draft", "--output_dir", tmp_path / "out"
    result = command(*export, "--draft_model_dir", heads, "--base_model_dir", base)
    assert result.returncode == 0, result.stderr
    assert "medusa draft (FasterDecoding)" in result.stdout
    assert "3 heads" in result.stdout
    assert f"hidden taps {BASE_LAYERS} (Medusa: output of the final norm)" in result.stdout
    swapped = ("--draft_model_dir", base, "--base_model_dir", heads, "--overwrite")
    result = command_here(*export, *swapped)
    assert_one_line_error(result, "is a draft, not a base")
    result = command_here("edgellm-inspect", heads)
    assert (result.returncode, "Medusa heads" in result.stdout) == (0, True), result.stderr
    result = command_here("edgellm-inspect", tmp_path / "out")
    assert (result.returncode, "medusa" in result.stdout) == (0, True), result.stderr
