"""Defaults of requests from generation_config.json and GGUF files."""

from __future__ import annotations

import json
import shutil

import pytest
from gguf_files import write_gguf, write_words
from transformers import AutoModelForCausalLM, GenerationConfig

from edgellm.core.errors import UnsupportedModelError
from edgellm.core.manifest import LLM_BUNDLE, LLM_ENGINE, load_bundle, load_engine
from edgellm.export.config.generation_defaults import generation_defaults

# Published files, without token ids.
QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
QWEN2_5 = {**QWEN3, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05}
LLAMA3_2 = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
GEMMA3 = {"do_sample": True, "top_k": 64, "top_p": 0.95, "cache_implementation": "hybrid"}
MAGISTRAL = {"do_sample": True, "temperature": 0.7, "min_p": 0.01, "max_new_tokens": 40960}
NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def _of_transformers(config: dict) -> dict:
    """What transformers' `generate` uses, without values that change nothing."""
    found = GenerationConfig.from_dict(config)
    found.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    values = {name: getattr(found, name) for name in NAMES}
    neutral = {"min_p": None, "repetition_penalty": 1.0}
    return {name: value for name, value in values.items() if neutral.get(name, ...) != value}


@pytest.mark.parametrize("config", [QWEN3, QWEN2_5, LLAMA3_2, GEMMA3, MAGISTRAL], ids=str)
def test_values_are_those_of_transformers(config):
    found = generation_defaults(config)
    assert found.pop("max_generate_length", None) == config.get("max_new_tokens")
    assert found == _of_transformers(config)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"eos_token_id": [1, 2], "temperature": None}, {}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.9}, {"temperature": 0.0}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"max_new_tokens": 9}, {"max_generate_length": 9}),
        ({"temperature": 0.6}, {"temperature": 0.6, "top_k": 50, "top_p": 1.0}),  # as vLLM's users
        ({"top_k": -1}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0}),
    ],
    ids=str,
)
def test_files_that_say_less(config, expected):
    assert generation_defaults(config) == expected


@pytest.mark.parametrize(
    "config",
    [{"temperature": "hot"}, {"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": 1.5},
     {"top_k": -2}, {"min_p": True}, {"do_sample": "yes"}, {"max_new_tokens": 0},
     {"repetition_penalty": float("nan")}],
    ids=str,
)  # fmt: skip
def test_invalid_values_fail_with_their_name(config):
    (name,) = config
    with pytest.raises(UnsupportedModelError, match=f"{name} .* not a valid default") as caught:
        generation_defaults(config)
    assert "generation_config.json" in caught.value.hint


def test_bundles_and_engines_keep_them(command_here, tiny_checkpoint, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint, checkpoint)
    (checkpoint / "generation_config.json").write_text(json.dumps({**QWEN3, "eos_token_id": 2}))
    bundle, engine = tmp_path / "bundle", tmp_path / "engine"
    result = command_here(
        "edgellm-export", "llm", "--model_dir", checkpoint, "--output_dir", bundle
    )
    assert result.returncode == 0, result.stderr
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert load_bundle(bundle, LLM_BUNDLE).generation_defaults == expected
    sizes = ("--maxInputLen", 16, "--maxKVCacheCapacity", 32)
    result = command_here("llm_build", "--onnxDir", bundle, "--engineDir", engine, *sizes)
    assert result.returncode == 0, result.stderr
    assert load_engine(engine, LLM_ENGINE).generation_defaults == expected


def test_a_gguf_file_may_have_them(command_here, tiny_checkpoint, tmp_path):
    def words(writer, size):
        write_words(writer, size)
        writer.add_float32("general.sampling.temp", 0.6)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_float32("general.sampling.penalty_repeat", 1.05)

    path, bundle = tmp_path / "model.gguf", tmp_path / "bundle"
    write_gguf(path, "llama", AutoModelForCausalLM.from_pretrained(tiny_checkpoint), words=words)
    result = command_here("edgellm-export", "llm", "--model_dir", path, "--output_dir", bundle)
    assert result.returncode == 0, result.stderr
    assert load_bundle(bundle, LLM_BUNDLE).generation_defaults == {
        "temperature": 0.6, "top_k": 20, "top_p": 1.0, "repetition_penalty": 1.05
    }  # fmt: skip
