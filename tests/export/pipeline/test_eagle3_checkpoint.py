"""`edgellm-export checkpoint`: drafts of all public layouts, converted for other engines."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import assert_one_line_error, make_checkpoint
from draft_layouts import BASE, LAYOUTS
from eagle_reference import Layout, make_draft
from gguf_files import write_gguf
from safetensors.torch import load_file
from transformers import AutoConfig

from edgellm.core.errors import EdgeLLMError
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.eagle3_checkpoint import ENGINES, command_line, hand_over
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft

AUX = "eagle_aux_hidden_state_layer_ids"
# Features that no engine supports, or that only vLLM computes correctly.
REFUSED = {
    "speculators_qwen3": ENGINES,
    "eagle1": ENGINES,
    "eagle1_without_bias": ENGINES,
    "peagle": ENGINES,
    "speculators_peagle": ENGINES,
    "speculators_windows": {"sglang", "tensorrt-llm"},
    "specforge_window": {"sglang", "tensorrt-llm"},
    "peagle_window": ENGINES,
    "automodel_eagle4": {"sglang", "tensorrt-llm"},
    "safeailab_narrow": {"sglang", "tensorrt-llm"},
    "specforge_eagle31": {"sglang"},
    "modelopt_base_head": {"sglang", "tensorrt-llm"},
    "modelopt_config_of_the_base": {"sglang", "tensorrt-llm"},
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


@pytest.mark.each_change(
    "safeailab_bin",
    "angelslim",
    "specforge_sharded",
    "modelopt_base_head",
    "modelopt_without_t2d",
    "speculators_qwen3",
    "speculators_windows",
    "biases",
    "peagle",
    "eagle1",
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_converted_draft_computes_the_same(tmp_path, bases, name):
    """Edgellm's reader reads equal weights from the converted checkpoint."""
    layout = LAYOUTS[name]
    base, draft = bases(layout.tied_base), make_draft(tmp_path / "draft", layout)
    for engine in ENGINES:
        output = tmp_path / engine
        if engine in REFUSED.get(name, ()):
            reasons = "does not compute|only EAGLE-3|of its own"
            with pytest.raises(EdgeLLMError, match=reasons):
                hand_over(open_draft(str(draft)), str(base), engine, output)
            assert not output.exists()
            continue
        hand_over(open_draft(str(draft)), str(base), engine, output)
        if layout.rank:  # these engines compute the whole head
            draft = make_draft(tmp_path / "whole", replace(layout, rank=0, candidates=0))
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
        _expect_windows(output, layout)


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


def _expect_windows(folder: Path, layout: Layout) -> None:
    """As transformers reads the config for vLLM."""
    config = AutoConfig.from_pretrained(folder)
    if not layout.sliding:
        assert getattr(config, "layer_types", None) is getattr(config, "sliding_window", None)
        return
    types = ["full_attention"] * layout.layers
    for layer in layout.sliding:
        types[layer] = "sliding_attention"
    assert (config.layer_types, config.sliding_window) == (types, layout.window)


def test_export_checkpoint_prints_the_command_of_the_engine(tmp_path, bases, command):
    layout = LAYOUTS["angelslim"]
    draft, base = make_draft(tmp_path / "draft", layout), bases(layout.tied_base)
    arguments = ["--draft_model_dir", draft, "--base_model_dir", base, "--output_dir"]
    said = command("edgellm-export", "checkpoint", *arguments, tmp_path / "out", "--for", "vllm")
    assert "vllm serve" in said.stdout
    again = command("edgellm-export", "checkpoint", *arguments, tmp_path / "out", "--for", "vllm")
    assert "finished already" in again.stdout
    assert again.stdout.splitlines()[1:] == said.stdout.splitlines()[1:]
    spaced = Path(shutil.copytree(base, tmp_path / "a base"))
    line = command_line("vllm", str(spaced), tmp_path / "out")
    assert shlex.split(line)[:3] == ["vllm", "serve", str(spaced)]
    other = ("--for", "sglang")
    refused = command("edgellm-export", "checkpoint", *arguments, tmp_path / "out", *other)
    assert_one_line_error(refused, "it has --for vllm, not sglang", "--overwrite")
    with pytest.raises(EdgeLLMError, match="no such"):
        hand_over(open_draft(str(draft)), str(base), "tgi", tmp_path / "o")


def test_a_gguf_base_takes_a_tokenizer_and_a_version(tmp_path, bases, command_here):
    """Transformers reads the tokenizer, and encodes with it as edgellm does."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    layout = LAYOUTS["angelslim"]
    draft, base = make_draft(tmp_path / "draft", layout), tmp_path / "a base.gguf"
    folder = bases(layout.tied_base)
    write_gguf(base, "llama", AutoModelForCausalLM.from_pretrained(folder, dtype="float32"))
    flags = ("--draft_model_dir", draft, "--base_model_dir", base, "--output_dir", tmp_path / "out")
    for engine in ("sglang", "tensorrt-llm"):
        refused = command_here("edgellm-export", "checkpoint", *flags, "--for", engine)
        assert_one_line_error(refused, "takes no draft for the GGUF file", "--for vllm")
    said = command_here("edgellm-export", "checkpoint", *flags, "--for", "vllm")
    assert said.returncode == 0, said.stderr
    _, install, serve = said.stdout.splitlines()
    assert shlex.split(install) == ["pip", "install", "vllm>=0.24", "vllm-gguf-plugin>=0.0.2"]
    words = shlex.split(serve)
    assert words[:5] == ["vllm", "serve", str(base), "--tokenizer", str(tmp_path / "out")]
    assert json.loads(words[-1])["model"] == str(tmp_path / "out")
    read = AutoTokenizer.from_pretrained(tmp_path / "out")
    own = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert read("w20 w30").input_ids == own.encode("w20 w30").ids
