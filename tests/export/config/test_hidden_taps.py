"""Hidden taps of a base equal transformers' `hidden_states`."""

from __future__ import annotations

import re

import numpy as np
import pytest
from conftest import assert_one_line_error, make_checkpoint
from eagle_reference import Layout, make_draft
from portable import allowed

from edgellm.core.errors import UnsupportedModelError
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.export import models
from edgellm.export.config.hidden_taps import default_taps
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.verify import run_outputs

AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def deep_checkpoint(tmp_path_factory):
    config = {**models.find("llama").TINY, "num_hidden_layers": 8}
    return make_checkpoint(tmp_path_factory.mktemp("deep"), **config)


def _export(command, model, output, *more):
    return command("edgellm-export", "llm", "--model_dir", model, "--output_dir", output, *more)


@pytest.mark.parametrize(
    ("layers", "taps"),
    [(7, (2, 3, 4)), (28, (2, 14, 25)), (30, (2, 15, 27)), (32, (2, 16, 29)), (36, (2, 18, 33))],
)
def test_default_taps_are_2_half_and_n_minus_3(layers, taps):
    assert default_taps(layers) == taps


@pytest.mark.parametrize("layers", range(1, 7))
def test_small_bases_have_no_default_taps(layers):
    with pytest.raises(UnsupportedModelError, match="too small for the default taps"):
        default_taps(layers)


@pytest.mark.each_change("*-llama")
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("taps", "cut"), [((2, 4, 5), None), ((0, 1, 8), None), ((8,), None), ((1, 1, 4), 4)]
)
def test_taps_equal_hidden_states(tmp_path, model_type, taps, cut):
    _compare(tmp_path, {**models.find(model_type).TINY, "num_hidden_layers": 8}, taps, cut)


@pytest.mark.each_change(
    "llama",
    "gemma3n_text",
    "gemma4_text",
    "qwen3_5_text",
    "kimi_linear",
    "granitemoehybrid",
    "nemotron_h",
    "falcon_h1",
    "qwen3_moe",
    "gpt_oss",
)
@pytest.mark.parametrize("model_type", models.supported())
def test_every_architecture_has_taps(tmp_path, model_type):
    """Taps from the scaled embeddings to the final norm's output."""
    config = models.find(model_type).TINY
    layers = config.get("num_hidden_layers") or len(config["layers_block_type"])
    _compare(tmp_path, config, (0, 1, layers), None)


def _compare(tmp_path, config, taps, cut):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = make_checkpoint(tmp_path / "checkpoint", **config)
    options = ExportOptions(dtype="fp32", num_layers=cut, hidden_taps=taps)
    manifest = export_llm(open_checkpoint(str(checkpoint)), tmp_path / "bundle", options)
    assert manifest.hidden_taps == taps
    assert manifest.options["hidden_taps"] == taps
    hf_config = AutoConfig.from_pretrained(checkpoint)
    if "num_hidden_layers" in config:  # else it follows from a list of layers
        hf_config.num_hidden_layers = cut or config["num_hidden_layers"]
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, config=hf_config, attn_implementation="eager"
    )
    ids = np.random.default_rng(4).integers(9, 96, 20)
    with torch.no_grad():
        result = model(torch.from_numpy(ids)[None], output_hidden_states=True)
        last = model.base_model(torch.from_numpy(ids)[None]).last_hidden_state
    states = result.hidden_states
    if states[0].dim() == 4:  # of Gemma 3n, which has several of a token: the active one
        states = [*(each[hf_config.altup_active_idx] for each in states[:-1]), last]
    expected = torch.cat([states[tap][0] for tap in taps], -1).numpy()
    found = run_outputs(tmp_path / "bundle", manifest, ids, 15)
    assert found.taps is not None
    logits = result.logits[0].numpy()
    np.testing.assert_allclose(found.taps, expected, atol=allowed(checkpoint, expected))
    np.testing.assert_allclose(found.logits, logits, atol=allowed(checkpoint, logits))


def test_the_graph_without_taps_is_unchanged(deep_checkpoint, tmp_path):
    """The taps add one output and its nodes, nothing else."""
    import onnx_ir as ir

    graphs = {}
    for name, taps in (("plain", ()), ("tapped", (2, 4, 5))):
        options = ExportOptions(dtype="fp32", hidden_taps=taps)
        export_llm(open_checkpoint(str(deep_checkpoint)), tmp_path / name, options)
        graphs[name] = ir.load(tmp_path / name / "model.onnx").graph
    plain, tapped = ([node.name for node in graph] for graph in graphs.values())
    assert tapped == [*plain, "taps.Concat"]
    outputs = [[value.name for value in graph.outputs] for graph in graphs.values()]
    assert outputs[1] == [*outputs[0][:2], "hidden_taps", *outputs[0][2:]]
    weights = [(tmp_path / name / "model.weights").read_bytes() for name in graphs]
    assert weights[0] == weights[1]


def test_is_eagle_base_writes_taps_to_the_manifest(command_here, deep_checkpoint, tmp_path):
    out = tmp_path / "out"
    flags = ("--is_eagle_base", "--dtype", "fp32", "--verify")
    result = _export(command_here, deep_checkpoint, out, *flags)
    assert result.returncode == 0, result.stderr
    assert "hidden taps for a draft: 2, 4, 5" in result.stdout
    found = re.search(r"max abs hidden tap difference (\S+) of values to", result.stdout)
    assert found is not None, result.stdout
    assert float(found[1]) < 2e-4
    manifest = load_bundle(out, LLM_BUNDLE)
    assert manifest.hidden_taps == (2, 4, 5)
    assert manifest.provenance["hidden_taps"] == "default"


def test_taps_refer_to_the_layers_before_the_cut(command_here, deep_checkpoint, tmp_path):
    out, flags = tmp_path / "out", ("--is_eagle_base", "--overwrite")
    result = _export(command_here, deep_checkpoint, out, "--is_eagle_base", "--num_layers", 7)
    assert result.returncode == 0, result.stderr
    assert load_bundle(out, LLM_BUNDLE).hidden_taps == (2, 3, 4)
    result = _export(command_here, deep_checkpoint, out, *flags, "--num_layers", 4)
    assert_one_line_error(result, "a base of 4 layers is too small", "--hidden_taps")
    flags = ("--hidden_taps", "2,4,5", "--overwrite")
    result = _export(command_here, deep_checkpoint, out, *flags, "--num_layers", 4)
    assert_one_line_error(
        result, "tap 2, 4, 5 is outside of 0 to 4", "the base has 4 layers", "trained for"
    )
    assert load_bundle(out, LLM_BUNDLE).hidden_taps == (2, 3, 4)


def test_invalid_tap_flags_are_rejected(command_here, tiny_checkpoint, tmp_path):
    out = tmp_path / "out"
    result = _export(command_here, tiny_checkpoint, out, "--is_eagle_base")
    assert_one_line_error(result, "too small for the default taps", "--hidden_taps")
    faults = {
        "2,x": "give whole numbers",
        ",": "give whole numbers",
        "2,1": "do not ascend",
        "-1,2": "outside of 0 to 3",
        "0,4": "outside of 0 to 3",
    }
    for text, message in faults.items():
        result = _export(command_here, tiny_checkpoint, out, "--hidden_taps", text)
        assert_one_line_error(result, message)
    result = _export(command_here, tiny_checkpoint, out, "--draft_model_dir", tiny_checkpoint)
    assert_one_line_error(result, "is not a draft")
    assert not out.exists()


_EAGLE1 = Layout(
    {"bias": False}, first="layers.0", eagle1=True, taps=(8,), own_head=False, draft_vocab=96,
    d2t=False, t2d=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "taps"),
    [
        (Layout({"draft_vocab_size": 40}), (2, 4, 5)),
        (Layout({"draft_vocab_size": 40, "eagle_config": {AUX: [0, 2, 5]}}), (1, 3, 6)),
        (_EAGLE1, (8,)),
    ],
    ids=["default", "configured", "eagle1"],
)
def test_draft_model_dir_sets_the_taps(command_here, deep_checkpoint, tmp_path, layout, taps):
    draft = make_draft(tmp_path / "draft", layout)
    flags = ("--draft_model_dir", draft)
    result = _export(command_here, deep_checkpoint, tmp_path / "out", *flags)
    assert result.returncode == 0, result.stderr
    manifest = load_bundle(tmp_path / "out", LLM_BUNDLE)
    assert manifest.hidden_taps == taps
    assert str(draft) in manifest.provenance["hidden_taps"]
    flags = (*flags, "--hidden_taps", "0,7", "--overwrite")
    result = _export(command_here, deep_checkpoint, tmp_path / "out", *flags)
    assert result.returncode == 0, result.stderr
    assert load_bundle(tmp_path / "out", LLM_BUNDLE).hidden_taps == (0, 7)
