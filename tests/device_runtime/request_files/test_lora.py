"""`available_lora_weights` and `lora_name` of request files."""

from __future__ import annotations

import dataclasses
import json

import pytest
from conftest import assert_one_line_error
from lora_adapters import write_adapter

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.device_runtime import LLM, SamplingParams

PROMPT = "w10 w11 w12 w13"


@pytest.fixture(scope="module")
def built(tiny_bundle, tiny_checkpoint, tmp_path_factory):
    """An engine and two adapters."""
    folder = tmp_path_factory.mktemp("requests")
    plan = dataclasses.replace(
        Plan(max_input_len=48, kv_capacity=64, threads=1, prefill="auto"),
        max_lora_rank=4,
        max_batch_size=3,
    )
    build_engine("llm", tiny_bundle, folder / "engine", plan, "onnxruntime", lambda _: None)
    adapters = {
        name: str(write_adapter(folder / name, tiny_checkpoint, seed=seed))
        for seed, name in enumerate(("one", "two"))
    }
    return folder / "engine", adapters


def _run(command, tmp_path, engine, adapters, names, *flags):
    requests = [
        {"messages": [{"role": "user", "content": PROMPT}], "lora_name": name} for name in names
    ]
    document = {
        "batch_size": 3,
        "temperature": 0,
        "max_generate_length": 12,
        "apply_chat_template": False,
        "available_lora_weights": adapters,
        "requests": requests,
    }
    (tmp_path / "in.json").write_text(json.dumps(document))
    result = command(
        "llm_inference",
        "--engineDir",
        engine,
        "--inputFile",
        tmp_path / "in.json",
        "--outputFile",
        tmp_path / "out.json",
        *flags,
    )
    if not (tmp_path / "out.json").exists():
        return result, []
    return result, json.loads((tmp_path / "out.json").read_text())["responses"]


def test_requests_name_adapters(command, built, tmp_path):
    engine, adapters = built
    names = [None, "one", "two", "one", "unknown"]
    result, responses = _run(command, tmp_path, engine, adapters, names)
    assert result.returncode == 1  # one has failed
    with LLM(engine) as llm:
        for name, folder in adapters.items():
            llm.load_adapter(name, folder)
        for name, response in zip(names[:4], responses, strict=False):
            sampling = SamplingParams(temperature=0)
            answer = llm.generate(PROMPT, lora=name, sampling=sampling, max_generate_length=12)
            assert response["output_text"] == "".join(step.text for step in answer)
    assert len({response["output_text"] for response in responses[:3]}) == 3
    assert responses[4]["error"]["message"] == "there is no adapter 'unknown'"


def test_adapters_that_cannot_be_loaded(command_here, built, tiny_engine, tmp_path):
    engine, adapters = built
    for where, given, words in (
        (engine, {"a": str(tmp_path / "nowhere")}, "no such folder"),
        (engine, {"": adapters["one"]}, "needs a name"),
        (tiny_engine, adapters, "takes no adapters"),
    ):
        result, responses = _run(command_here, tmp_path, where, given, ["a"])
        assert_one_line_error(result, words)
        assert responses == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kernels", "onnxruntime"), "on a CPU edgellm's kernels take adapters"),
        (("--maxLoras", 2), "it goes with --device cuda, or --backend tensorrt"),
        (("--device", "cuda", "--maxLoras", 2, "--maxLoraRank", 0), "give --maxLoraRank, too"),
    ],
)
def test_builds_without_lora_are_rejected(command_here, tiny_bundle, tmp_path, flags, words):
    result = command_here(
        "llm_build",
        "--onnxDir",
        tiny_bundle,
        "--engineDir",
        tmp_path / "engine",
        "--maxInputLen",
        48,
        "--maxKVCacheCapacity",
        64,
        "--backend",
        "onnxruntime",
        "--maxLoraRank",
        4,
        *flags,
    )
    assert_one_line_error(result, words)
    assert not (tmp_path / "engine").exists()
