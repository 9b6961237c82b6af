"""Export, build, inference and serving with the packages of a device, of any allowed version."""

from __future__ import annotations

import json

import pytest
from conftest import Command
from installed import PROJECT
from lettered_engine import with_letters
from numpy_llama import write_llama
from packaging.requirements import Requirement
from serve_process import serving

from edgellm.device_runtime import LLM, SamplingParams, SpecOptions

MESSAGES = [{"role": "user", "content": "w9 w10"}]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    from edgellm.export.graph.architecture import ExportOptions
    from edgellm.export.pipeline.llm import export_llm
    from edgellm.export.pipeline.open_checkpoint import open_checkpoint

    folder = tmp_path_factory.mktemp("without_torch")
    checkpoint = open_checkpoint(str(write_llama(folder / "checkpoint")))
    export_llm(checkpoint, folder / "bundle", ExportOptions(dtype="fp32"))
    return folder / "bundle"


@pytest.fixture(scope="module", params=["none", "int8", "int4"])
def engine(request, bundle, tmp_path_factory):
    from edgellm.build.engine import build_engine
    from edgellm.build.plan import Plan

    folder = tmp_path_factory.mktemp("engines") / request.param
    limits = {"max_input_len": 48, "kv_capacity": 64, "max_verify_tree_size": 8}
    plan = Plan(**limits, threads=1, quantize=request.param, max_batch_size=2)
    build_engine("llm", bundle, folder, plan, "onnxruntime", lambda _: None)
    return folder


def test_the_commands_make_an_engine(command: Command, bundle, tmp_path):
    checkpoint, made, engine = bundle.parent / "checkpoint", tmp_path / "b", tmp_path / "engine"
    exported = command("edgellm-export", "llm", "--model_dir", checkpoint, "--output_dir", made)
    assert exported.returncode == 0, exported.stderr
    sizes = ("--maxInputLen", 48, "--maxKVCacheCapacity", 64)
    built = command("llm_build", "--onnxDir", made, "--engineDir", engine, *sizes)
    assert built.returncode == 0, built.stderr
    source, output = tmp_path / "in.json", tmp_path / "out.json"
    source.write_text(json.dumps({"requests": [{"messages": MESSAGES}], "max_generate_length": 8}))
    files = ("--inputFile", source, "--outputFile", output)
    ran = command("llm_inference", "--engineDir", engine, *files)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(output.read_text())["responses"][0]["output_text"]


def test_outputs_are_those_of_any_schedule(engine):
    """Alone, in a batch and with speculation, which computes other forward passes."""
    greedy = SamplingParams(temperature=0)
    llm = LLM(engine)
    (alone,) = llm.generate_batch([MESSAGES], sampling=greedy, max_generate_length=8)
    assert len(alone.token_ids) == 8
    both = llm.generate_batch([MESSAGES, MESSAGES], sampling=greedy, max_generate_length=8)
    speculative = LLM(engine, spec=SpecOptions(network=None, lookups=("ngram",)))
    (drafted,) = speculative.generate_batch([MESSAGES], sampling=greedy, max_generate_length=8)
    assert [one.token_ids for one in (*both, drafted)] == [alone.token_ids] * 3


@pytest.mark.parametrize("engine", ["int8"], indirect=True)
def test_the_server_answers_with_a_form(engine, tmp_path):
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": {"enum": ["ab"]}}}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
    with serving(with_letters(engine, tmp_path / "lettered")) as server:
        status, answer = server.json("/v1/chat/completions", {**body, "response_format": form})
        assert (status, answer["choices"][0]["message"]["content"]) == (200, '"ab"')
        assert server.metric("vllm:generation_tokens_total") == answer["usage"]["completion_tokens"]


def test_every_dependency_has_a_lowest_version():
    """Without one, `make lowest` would take the first version ever published."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    for text in (*PROJECT["project"]["dependencies"], *(each for one in extras for each in one)):
        needed = Requirement(text)
        bounds = {specifier.operator for specifier in needed.specifier}
        assert needed.name == "edgellm" or bounds & {">=", "=="}, text
