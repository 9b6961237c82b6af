"""LoRA adapters as models of a server: named, listed, loaded and dropped while it answers."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
from lora_adapters import write_adapter
from serve_process import serving

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime import LLM, SamplingParams
from edgellm.tools.serve.protocols.openai.lora import load_given

PROMPT = "w10 w11 w12 w13"


@pytest.fixture(scope="module")
def adapters(tiny_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(folder / name, tiny_checkpoint, seed=seed)
        for seed, name in enumerate(("one", "two", "three"))
    }


@pytest.fixture(scope="module")
def engine(tiny_bundle, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "engine"
    plan = dataclasses.replace(
        Plan(max_input_len=48, kv_capacity=64, threads=1, prefill="auto"),
        max_lora_rank=4,
        max_batch_size=3,
    )
    build_engine("llm", tiny_bundle, folder, plan, "onnxruntime", lambda _: None)
    return folder


@pytest.fixture(scope="module")
def expected(engine, adapters):
    """The offline answers."""
    texts = {}
    with LLM(engine) as llm:
        for name, folder in adapters.items():
            llm.load_adapter(name, folder)
        for name in (None, *adapters):
            sampling = SamplingParams(temperature=0)
            answer = llm.generate(PROMPT, lora=name, sampling=sampling, max_generate_length=12)
            texts[name or "tiny"] = "".join(step.text for step in answer)
    assert len({*texts.values()}) == 4
    return texts


@pytest.fixture(scope="module")
def adapted(engine, adapters):
    folder = adapters["two"].parent
    with serving(
        engine,
        "--modelName",
        "tiny",
        "--loraModule",
        f"one={adapters['one']}",
        "--allowLoraFolder",
        folder,
    ) as process:
        yield process


def _ask(adapted, model):
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    status, answer = adapted.json("/v1/completions", body)
    assert status == 200, answer
    assert answer["model"] == model
    return answer["choices"][0]["text"]


def _ask_triton(adapted, model, expected):
    body = {"text_input": PROMPT, "max_tokens": 12, "exclude_input_in_output": True}
    found = adapted.json(f"/v2/models/{model}/generate", body)[1]
    assert (found["model_name"], found["text_output"]) == (model, expected)
    inputs = [
        {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [PROMPT]},
        {"name": "max_tokens", "datatype": "INT32", "shape": [1], "data": [12]},
        {"name": "exclude_input_in_output", "datatype": "BOOL", "shape": [1], "data": [True]},
    ]
    found = adapted.json(f"/v2/models/{model}/infer", {"inputs": inputs})[1]
    assert (found["model_name"], found["outputs"][0]["data"]) == (model, [expected])


def _models(adapted):
    cards = adapted.json("/v1/models")[1]["data"]
    assert all(card.get("parent", card["id"]) == "tiny" for card in cards)
    return [card["id"] for card in cards]


def test_adapters_are_models(adapted, adapters, expected):
    assert _models(adapted) == ["tiny", "one"]
    assert adapted.json("/v1/models/one")[1]["parent"] == "tiny"
    for name in ("two", "three"):
        body = {"lora_name": name, "lora_path": str(adapters[name])}
        assert adapted.json("/v1/load_lora_adapter", body)[0] == 200
    assert _models(adapted) == ["tiny", "one", "three", "two"]
    with ThreadPoolExecutor(8) as pool:
        names = [*expected] * 4
        assert list(pool.map(lambda name: _ask(adapted, name), names)) == [
            expected[name] for name in names
        ]
    chat = {"model": "two", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
    for path in ("/v1/chat/completions", "/v1/messages"):
        assert adapted.json(path, chat)[1]["model"] == "two"
    ollama = {"model": "two", "prompt": PROMPT, "stream": False, "raw": True}
    assert adapted.json("/api/generate", ollama)[1]["model"] == "two"
    _ask_triton(adapted, "three", expected["three"])
    assert adapted.json("/v1/unload_lora_adapter", {"lora_name": "three"})[0] == 200
    assert _models(adapted) == ["tiny", "one", "two"]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("completions", {"model": "unknown", "prompt": "w9"}, 404, "no model 'unknown' here"),
        ("unload_lora_adapter", {"lora_name": "unknown"}, 404, "no model 'unknown' here"),
        ("unload_lora_adapter", {"lora_name": "tiny"}, 400, "this is the base"),
        ("load_lora_adapter", {"lora_name": "tiny", "lora_path": "/"}, 400, "the base has this"),
        ("load_lora_adapter", {"lora_name": "a", "lora_path": "/etc"}, 400, "outside the folders"),
        ("load_lora_adapter", {"lora_name": "a", "lora_path": "\0"}, 400, "outside the folders"),
        ("load_lora_adapter", {"lora_name": "", "lora_path": "x"}, 400, "lora_name"),
        ("load_lora_adapter", {"lora_name": "a"}, 400, "lora_path: field required"),
    ],
)
def test_invalid_adapter_requests_are_rejected_with_the_reason(adapted, path, body, status, words):
    found, answer = adapted.json(f"/v1/{path}", body)
    assert found == status
    assert words in answer["error"]["message"]


def test_folders_that_hold_no_adapter(adapted, adapters):
    folder = adapters["one"].parent
    body = {"lora_name": "new", "lora_path": str(folder)}
    status, answer = adapted.json("/v1/load_lora_adapter", body)
    assert status == 400
    assert "holds no adapter_config.json" in answer["error"]["message"]
    body = {"lora_name": "one", "lora_path": str(adapters["two"])}
    assert "another adapter" in adapted.json("/v1/load_lora_adapter", body)[1]["error"]["message"]


def test_adapters_cannot_be_loaded_without_an_allowed_folder(server, adapters):
    body = {"lora_name": "a", "lora_path": str(adapters["one"])}
    assert server.json("/v1/load_lora_adapter", body)[0] == 403
    assert server.json("/v1/unload_lora_adapter", {"lora_name": "a"})[0] == 403


def test_adapters_that_are_given_at_the_start(engine, offline, adapters):
    one = adapters["one"]
    with LLM(engine) as llm:
        for given, words in (
            ("a", "--loraModule a"),
            ("=x", "--loraModule =x"),
            (f"tiny={one}", "is there already"),
            (f"a={one.parent}", "holds no adapter"),
        ):
            with pytest.raises(EdgeLLMError, match=words):
                load_given(llm, [given], ["tiny"])
        load_given(llm, [f"a={one}", f"b={one}"], ["tiny"])
        assert list(llm.adapters) == ["a", "b"]
        with pytest.raises(EdgeLLMError, match="a is there already"):
            load_given(llm, [f"a={one}"], ["tiny"])
    with pytest.raises(EdgeLLMError, match="takes no adapters"):
        load_given(offline, [f"a={one}"], ["tiny"])
