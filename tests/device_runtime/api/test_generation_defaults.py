"""Options that a request does not give: flags, the model's defaults, edgellm's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from manifests import read_manifest, write_manifest

from edgellm.core.errors import BrokenArtifactError, RequestError
from edgellm.device_runtime import LLM, SamplingParams
from edgellm.device_runtime.api.generation_request import GenerationDefaults
from edgellm.device_runtime.request_files.request_file import Options, parse_request, sampling_of

USER = {"role": "user", "content": "w20 w21"}
MODEL = {"temperature": 3.0, "top_p": 0.95, "top_k": 0, "max_generate_length": 5}


def with_defaults(engine: Path, folder: Path, values: object) -> Path:
    """A copy of an engine whose manifest has these defaults."""
    shutil.copytree(engine, folder)
    write_manifest(folder, {**read_manifest(folder), "generation_defaults": values})
    return folder


@pytest.fixture
def engine(tiny_engine, tmp_path) -> Path:
    return with_defaults(tiny_engine, tmp_path / "engine", MODEL)


def test_the_models_values_are_used(engine):
    with LLM(engine) as llm:
        sampling = llm.sampling_params()
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (3.0, 0.95, 0)
        assert llm.sampling_params(top_k=4).top_k == 4
        output = llm.generate("w20 w21")
        list(output)
        assert len(output.token_ids) <= 5
        assert output.warnings == []
        repeated = llm.generate("w20 w21", sampling=llm.sampling_params(seed=output.seed))
        list(repeated)
        assert repeated.token_ids == output.token_ids
        seeds = {llm.generate("w20").seed for _ in range(4)}
        assert len(seeds) == 4


def test_explicit_sampling_is_complete(engine):
    with LLM(engine) as llm:
        output = llm.generate("w20", sampling=SamplingParams(temperature=0), max_generate_length=7)
        assert output.seed is None
        assert output.max_tokens == 7
        with pytest.raises(RequestError, match="tempreature"):
            llm.sampling_params(tempreature=1)


def test_request_options_override_flags_and_model_defaults():
    """Request, file, flags, model, edgellm."""
    model = GenerationDefaults.of({"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1})
    defaults = model.overridden(GenerationDefaults.of({"top_p": 0.7, "top_k": 30, "min_p": 0.2}))
    raw = {"messages": [USER], "min_p": 0.5}
    options = Options(top_k=40, min_p=0.4)
    found = sampling_of(parse_request(raw, 0).merged(options), defaults)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.6, 0.7, 40, 0.5)
    assert found.repetition_penalty == SamplingParams().repetition_penalty
    assert sampling_of(options, defaults, greedy=True).is_greedy


def test_engines_without_defaults_keep_working(tiny_engine, tmp_path):
    folder = tmp_path / "engine"
    shutil.copytree(tiny_engine, folder)
    content = read_manifest(folder)
    del content["generation_defaults"]
    write_manifest(folder, content)
    with LLM(folder) as llm:
        assert (llm.sampling_params().temperature, llm.generate("w20").max_tokens) == (1.0, 63)


@pytest.mark.parametrize(
    "values", [{"temperature": "hot"}, {"tempreature": 1}, {"max_generate_length": 0}], ids=str
)
def test_damaged_defaults_are_reported(tiny_engine, tmp_path, values):
    folder = with_defaults(tiny_engine, tmp_path / "engine", values)
    with pytest.raises(BrokenArtifactError, match="generation_defaults: "):
        LLM(folder)


def test_unknown_options_get_a_suggestion():
    with pytest.raises(RequestError, match="'tempreature' is not an option") as caught:
        GenerationDefaults.of({"tempreature": 1})
    assert caught.value.hint.startswith("did you mean temperature? options: temperature, top_p")


def test_files_use_them_and_outputs_have_the_seed(engine, infer_here):
    sampled = {"messages": [USER]}
    requests = [sampled, {**sampled, "seed": 9}, {**sampled, "temperature": 0}]
    result, outputs = infer_here(engine, {"requests": requests})
    assert result.returncode == 0, result.stderr
    assert all(output["generated_token_count"] <= 5 for output in outputs)
    assert [output.get("seed") for output in outputs][1:] == [9, None]
    repeated = {**sampled, "seed": outputs[0]["seed"]}
    _, again = infer_here(engine, {"requests": [repeated]})
    assert again[0]["output_text"] == outputs[0]["output_text"]
    _, greedy = infer_here(engine, {"requests": [sampled]}, "--temperature", 0, "--maxTokens", 2)
    assert greedy[0]["generated_token_count"] <= 2
    assert outputs[2]["output_text"].startswith(greedy[0]["output_text"].strip())
    _, own = infer_here(engine, {"max_generate_length": 3, "requests": [sampled]}, "--maxTokens", 2)
    assert own[0]["generated_token_count"] <= 3
