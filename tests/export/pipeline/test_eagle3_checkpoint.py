"""`edgellm-export checkpoint`: drafts of all public layouts, converted for other engines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import assert_one_line_error, make_checkpoint
from draft_layouts import BASE, LAYOUTS
from eagle_reference import make_draft
from safetensors.torch import load_file

from edgellm.core.errors import EdgeLLMError
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.eagle3_checkpoint import ENGINES, hand_over
from edgellm.export.pipeline.resolve import open_checkpoint, open_draft

AUX = "eagle_aux_hidden_state_layer_ids"
# Features that no engine supports, or that only vLLM computes correctly.
REFUSED = {
    "speculators_qwen3": ENGINES,
    "eagle1": ENGINES,
    "eagle1_without_bias": ENGINES,
    "peagle": ENGINES,
    "speculators_peagle": ENGINES,
    "safeailab_narrow": {"sglang", "tensorrt-llm"},
    "specforge_eagle31": {"sglang"},
    "modelopt_base_head": {"sglang", "tensorrt-llm"},
    "speculators_llama": {"sglang", "tensorrt-llm"},
    "biases": {"sglang"},
    "five_taps": {"sglang", "tensorrt-llm"},
    "modelopt_norms": {"sglang"},
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """The base of a layout, with an untied or a tied head."""
    made: dict[bool, Path] = {}

    def get(tied: bool) -> Path:
        if tied not in made:
            config = {**BASE, "tie_word_embeddings": tied}
            made[tied] = make_checkpoint(tmp_path_factory.mktemp("base"), **config)
        return made[tied]

    return get


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_converted_draft_computes_the_same(tmp_path, bases, name):
    """Edgellm's reader reads equal weights from the converted checkpoint."""
    layout = LAYOUTS[name]
    base, draft = bases(layout.tied_base), make_draft(tmp_path / "draft", layout)
    for engine in ENGINES:
        output = tmp_path / engine
        if engine in REFUSED.get(name, ()):
            with pytest.raises(EdgeLLMError, match=r"does not compute|only EAGLE-3|of its own"):
                hand_over(open_draft(str(draft)), str(base), engine, output)
            assert not output.exists()
            continue
        hand_over(open_draft(str(draft)), str(base), engine, output)
        found, wanted = (
            export_draft(
                open_draft(str(folder)),
                open_checkpoint(str(base), tokenizer=False),
                tmp_path / f"{engine}-{folder.name}-bundle",
                DraftOptions("fp32"),
            )
            for folder in (output, draft)
        )
        assert found.files["model.weights"] == wanted.files["model.weights"]
        assert found.files["fuse.weights"] == wanted.files["fuse.weights"]
        assert found.draft == wanted.draft
        _expect_names(output, layout.taps)


def _expect_names(folder: Path, taps: tuple[int, ...]) -> None:
    config, tensors = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config[AUX] == list(taps)
    assert config["eagle_config"][AUX] == [tap - 1 for tap in taps]
    assert "midlayer.self_attn.q_proj.weight" in tensors
    assert tensors["lm_head.weight"].shape[0] == config["draft_vocab_size"]
    if "d2t" in tensors:
        ids = tensors["d2t"].numpy() + np.arange(config["draft_vocab_size"])
        assert np.array_equal(np.flatnonzero(tensors["t2d"].numpy()), np.sort(ids))
    else:
        assert config["draft_vocab_size"] == config["vocab_size"]


def test_export_checkpoint_prints_the_command_of_the_engine(tmp_path, bases, command):
    layout = LAYOUTS["angelslim"]
    draft, base = make_draft(tmp_path / "draft", layout), bases(layout.tied_base)
    arguments = ["--draft_model_dir", draft, "--base_model_dir", base, "--output_dir"]
    said = command("edgellm-export", "checkpoint", *arguments, tmp_path / "out", "--for", "vllm")
    assert "vllm serve" in said.stdout
    again = command("edgellm-export", "checkpoint", *arguments, tmp_path / "out", "--for", "vllm")
    assert "finished already" in again.stdout
    assert again.stdout.splitlines()[1:] == said.stdout.splitlines()[1:]
    other = ("--for", "sglang")
    refused = command("edgellm-export", "checkpoint", *arguments, tmp_path / "out", *other)
    assert_one_line_error(refused, "it has for vllm, not sglang", "--overwrite")
    with pytest.raises(EdgeLLMError, match="no such"):
        hand_over(open_draft(str(draft)), str(base), "tgi", tmp_path / "o")
