"""Configs of block drafters: facts, and rejected configs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from block_reference import LAYOUTS, make_blocks
from conftest import assert_one_line_error, make_checkpoint
from eagle_reference import BASE_LAYERS, VOCAB
from safetensors.torch import load_file, save_file

from edgellm.core.errors import EdgeLLMError
from edgellm.export import models
from edgellm.export.pipeline.draft import DraftOptions, understand_draft
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    return make_checkpoint(
        folder, **{**models.find("llama").TINY, "num_hidden_layers": BASE_LAYERS}
    )


def understood(base, folder, layout="dflash", *, own=None, without=(), **config):
    """Facts of a draft with other config keys."""
    make_blocks(folder, LAYOUTS[layout], **config)
    path = folder / "config.json"
    found = json.loads(path.read_text())
    found.get("dflash_config", {}).update(own or {})
    for key in without:
        found.pop(key, None)
        found.get("dflash_config", {}).pop(key, None)
    path.write_text(json.dumps(found))
    draft = open_draft(str(folder))
    return understand_draft(draft, open_checkpoint(str(base)), DraftOptions("fp32"))


@pytest.mark.parametrize(
    ("layout", "changes", "expected"),
    [
        ("dflash", {"is_causal": True}, ("jetspec", True, None)),
        ("dflash", {"own": {"causal": True}}, ("jetspec", True, None)),
        (
            "dflash",
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 48},
            ("jetspec", True, 48),
        ),
        (
            "dflash2",
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 48, "is_causal": False},
            ("dflash2", False, 48),
        ),
        ("dflash", {"use_sliding_window": False, "sliding_window": 48}, ("dflash", False, None)),
        ("deepspec", {"sample_from_anchor": False}, ("dspark", False, None)),
        (
            "deepspec",
            {"architectures": ["DSparkDraftModel"], "sample_from_anchor": True},
            ("dspark", False, None),
        ),
    ],
)
def test_configs_of_every_layout_are_read(base, tmp_path, layout, changes, expected):
    found = understood(base, tmp_path, layout, **changes)
    window = found.draft.decoder.sliding_window
    assert (found.kind, found.block.is_causal, window) == expected
    assert found.block.mask_token_id == 95
    assert found.block.from_newest is (layout == "deepspec" and "architectures" in changes)


def test_default_taps_are_spread_over_the_layers(base, tmp_path):
    with pytest.raises(EdgeLLMError, match="2 taps of 96 make 192"):  # outputs of 1 and n - 3
        understood(base, tmp_path, without=["target_layer_ids"])


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("dflash", {"without": ["block_size"]}, "config.json has no block_size"),
        ("dflash", {"without": ["mask_token_id"]}, "no mask_token_id"),
        ("dflash", {"block_size": 1}, "block_size = 1 predicts no token"),
        ("dflash", {"own": {"mask_token_id": VOCAB}}, "mask_token_id 96 is not one of"),
        ("dflash", {"num_target_layers": 9}, "num_target_layers = 9 is not supported"),
        ("dflash", {"own": {"target_layer_ids": [1, 3, 7]}}, "the last layer's output"),
        ("dflash", {"own": {"target_layer_ids": [1, "3"]}}, "not a list of integers"),
        (
            "dflash",
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
            "blocks are causal in layers that slide",
        ),
        ("dflash", {"layer_types": ["sliding_attention"] * 2}, "sliding_window = None"),
        (
            "dflash",
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 0},
            "sliding_window = 0",
        ),
        ("dflash", {"layer_types": [["x"], "full_attention"]}, r"layer_types = \[\['x'\]"),
        ("dflash", {"use_sliding_window": True}, "but no layer slides"),
        ("dflash", {"architectures": ["DFlash2DraftModel"]}, "the tensors are those of dflash"),
        ("dflash", {"own": {"wisdom": 2}}, "does not understand: wisdom"),
        ("dflash", {"hidden_size": 80}, "draft is for a base of hidden size 80"),
        ("deepspec", {"markov_head_type": "gated"}, "markov_head_type = 'gated'"),
        ("deepspec", {"architectures": ["DSparkDraftModel"]}, "does not say whether the row of"),
        ("dflash2", {"own": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping = 30.0"),
        ("dflash2", {"own": {"input_embedding_scale": 2.0}}, "input_embedding_scale = 2.0"),
    ],
)
def test_unsupported_configs_are_rejected(base, tmp_path, layout, changes, message):
    with pytest.raises(EdgeLLMError, match=message):
        understood(base, tmp_path, layout, **changes)


def test_missing_and_superfluous_tensors_stop_the_export(base, tmp_path):
    draft = make_blocks(tmp_path, LAYOUTS["dflash"])
    tensors = load_file(draft / "model.safetensors")
    save_file(
        {**tensors, "mask_embedding": tensors["norm.weight"] + 0}, draft / "model.safetensors"
    )
    checkpoints = open_draft(str(draft)), open_checkpoint(str(base))
    with pytest.raises(EdgeLLMError, match="mask_embedding"):
        understand_draft(*checkpoints, DraftOptions("fp32"))
    del tensors["layers.1.mlp.up_proj.weight"]
    save_file(tensors, draft / "model.safetensors")
    with pytest.raises(EdgeLLMError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        understand_draft(open_draft(str(draft)), checkpoints[1], DraftOptions("fp32"))


def test_a_draft_is_rejected_as_a_base(base, tmp_path, command_here):
    draft = make_blocks(tmp_path / "draft", replace(LAYOUTS["dflash"]))
    result = command_here(
        "edgellm-export",
        "draft",
        "--draft_model_dir",
        base,
        "--base_model_dir",
        draft,
        "--output_dir",
        tmp_path / "out",
    )
    assert_one_line_error(result, "is a draft, not a base")
