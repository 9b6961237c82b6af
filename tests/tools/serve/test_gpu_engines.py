"""Adapters and pictures in one batch with an engine for GPUs, on a fake GPU."""

from __future__ import annotations

import base64
import io
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from eagle_engines import EaglePair
from fake_gpu import FakeDevice
from image_checkpoints import picture
from inside_server import Inside, serving_inside
from lora_adapters import write_adapter
from lowered_engines import Lowered
from manifests import read_manifest, write_manifest
from vlm_engines import MROPE, build_vlm

from edgellm.build.lowering.lora import write_adapted_layers
from edgellm.device_runtime import LLM, SamplingParams
from edgellm.device_runtime.runners.tensorrt.batch_runner import BatchRunner
from edgellm.tools.serve.engines.loading import Loading
from edgellm.tools.serve.engines.models import read_models
from edgellm.tools.serve.settings import Settings

pytestmark = pytest.mark.usefixtures("one_thread")
MOST, TOKENS = 4, 8


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """An engine that sees and takes adapters, with its encoder."""
    built = build_vlm(tmp_path, "qwen2_5_vl", MROPE, "fp16")
    names = "checkpoint", "draft", "bundle", "draft_bundle", "engine"
    pair = EaglePair(MROPE, *(tmp_path / name for name in names))
    lowered = Lowered(pair, tmp_path, codes="fp16", answers=MOST, adapter_rank=4)
    write_adapted_layers(pair.bundle / "model.onnx", built.engine)
    content = read_manifest(built.engine)
    content["options"] |= lowered.manifest.options
    write_manifest(built.engine, {**content, "max_batch_size": MOST})
    lowered.replace_engines(monkeypatch, FakeDevice())
    return built


@pytest.fixture
def adapters(engines, tmp_path):
    """Of the language model, by name."""
    return {
        name: write_adapter(
            tmp_path / "adapters" / name,
            engines.checkpoint,
            seed=seed,
            targets=("q_proj", "v_proj"),
        )
        for seed, name in enumerate(("one", "two"))
    }


def _message(text: str, seed: int | None) -> list[dict]:
    parts: list[dict] = [{"type": "text", "text": text}]
    if seed is not None:
        target = io.BytesIO()
        picture(33, 21, seed=seed).save(target, "png")
        url = "data:image/png;base64," + base64.b64encode(target.getvalue()).decode()
        parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return [{"role": "user", "content": parts}]


def _post(server: Inside, path: str, body: dict) -> dict:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def _own_parts(messages: list[dict]) -> list[dict]:
    """As request files and Python have them."""
    (content,) = [message["content"] for message in messages]
    asked = [
        {"type": "image", "image": part["image_url"]["url"]} if "image_url" in part else part
        for part in content
    ]
    return [{"role": "user", "content": asked}]


def _expected(llm: LLM, name: str, messages: list[dict]) -> str:
    answer = llm.generate(
        _own_parts(messages),
        lora=None if name == "tiny" else name,
        sampling=SamplingParams(temperature=0),
        max_generate_length=TOKENS,
    )
    return "".join(step.text for step in answer)


def _asked() -> list[tuple[str, list[dict]]]:
    return [
        ("tiny", _message("w1", seed=1)),
        ("one", _message("w1", seed=1)),
        ("two", _message("w3", seed=2)),
        ("one", _message("w4 w5", seed=None)),
    ]


def _alone(engines, adapters) -> list[str]:
    """What each of them gets alone."""
    with LLM(engines.engine, multimodal_engine_dir=engines.visual_engine) as llm:
        for name, folder in adapters.items():
            llm.load_adapter(name, folder)
        expected = [_expected(llm, *each) for each in _asked()]
    assert expected[0] != expected[1], "an adapter changes nothing"
    return expected


def _watch(monkeypatch) -> list[int]:
    """How many answers share each pass from now on."""
    shared, run_batch = list[int](), BatchRunner.run_batch
    monkeypatch.setattr(
        BatchRunner,
        "run_batch",
        lambda self, parts: shared.append(len(parts)) or run_batch(self, parts),
    )
    return shared


def test_a_server_shares_passes(engines, adapters, tmp_path, monkeypatch):
    asked, expected = _asked(), _alone(engines, adapters)
    shared = _watch(monkeypatch)
    models = read_models([f"tiny={engines.engine}"], [str(engines.visual_engine)])
    settings = Settings(lora_folders=((tmp_path / "adapters").resolve(),))
    with serving_inside(models, Loading(), settings) as server, ThreadPoolExecutor(MOST) as pool:
        for name, folder in adapters.items():
            _post(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        bodies = [
            {"model": name, "messages": messages, "max_tokens": TOKENS, "temperature": 0}
            for name, messages in asked
        ]
        found = [*pool.map(lambda body: _post(server, "/v1/chat/completions", body), bodies)]
    assert [one["choices"][0]["message"]["content"] for one in found] == expected
    assert [one["model"] for one in found] == [name for name, _ in asked]
    assert max(shared) > 1


def test_a_file_of_requests_shares_passes(engines, adapters, command_here, tmp_path, monkeypatch):
    expected = _alone(engines, adapters)
    shared = _watch(monkeypatch)
    requests = [
        {"messages": _own_parts(messages), "lora_name": None if name == "tiny" else name}
        for name, messages in _asked()
    ]
    document = {
        "batch_size": MOST,
        "temperature": 0,
        "max_generate_length": TOKENS,
        "available_lora_weights": {name: str(folder) for name, folder in adapters.items()},
        "requests": requests,
    }
    files = tmp_path / "in.json", tmp_path / "out.json"
    files[0].write_text(json.dumps(document))
    flags = ("--engineDir", engines.engine, "--multimodalEngineDir", engines.visual_engine)
    result = command_here(
        "llm_inference", *flags, "--inputFile", files[0], "--outputFile", files[1]
    )
    assert result.returncode == 0, result.stderr
    responses = json.loads(files[1].read_text())["responses"]
    assert [response["output_text"] for response in responses] == expected
    assert max(shared) > 1
