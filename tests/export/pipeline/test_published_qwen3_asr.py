"""Qwen3-ASR as Qwen publishes it, against transformers with the same weights."""

from __future__ import annotations

import io
import json
import shutil
import sys

import numpy as np
import pytest
from audio_checkpoints import AudioReference, build_bundles, make_audio_model, publish_qwen3_asr
from conftest import assert_one_line_error
from lora_adapters import logits_of, write_adapter
from lora_adapters import reference as reference_of
from quantize_cases import load, make_job, write_text
from safetensors.numpy import load_file, save_file
from speech_checkpoints import chirp, write_wav

from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.verify import run_portable
from edgellm.quantize.pipeline.run import run_job

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """In transformers' layout."""
    pytest.importorskip("torch")
    return make_audio_model(
        tmp_path_factory.mktemp("model") / "hf", "qwen3_asr", hidden_size=64, intermediate_size=96
    )


@pytest.fixture(scope="module")
def published(original):
    return publish_qwen3_asr(original, original.parent / "published")


@pytest.fixture(scope="module")
def reference(original):
    return AudioReference(original)


def test_logits_and_greedy_answers_are_those_of_transformers(published, reference, tmp_path):
    import torch

    made = build_bundles(published, tmp_path)
    ids = np.arange(20) * 7 % 90 + 1
    with torch.no_grad():
        expected = reference.model(torch.from_numpy(ids)[None]).logits[0].numpy()
    bundle = tmp_path / "bundle"
    logits = run_portable(bundle, load_bundle(bundle, LLM_BUNDLE), ids, 12)
    np.testing.assert_allclose(logits, expected, atol=2e-4)
    samples, path = chirp(2.63), write_wav(tmp_path / "a.wav", chirp(2.63))
    messages = [{"role": "user", "content": [{"type": "audio", "audio": str(path)}]}]
    with LLM(made.engine, audio_engine_dir=made.audio_engine) as llm:
        output = llm.generate(messages, sampling=GREEDY, max_generate_length=12)
        found = [token for step in output for token in step.token_ids]
        text = llm.formatter.format(messages)
    ids, wanted = reference.answer(text, [samples], 12)
    assert output.prompt_token_count == len(ids)
    assert found == [token for token in wanted if token != 2]
    assert len(found) > 3


def test_a_quantized_checkpoint_has_names_of_transformers(original, published, tmp_path):
    text, folder = write_text(tmp_path / "text.jsonl"), tmp_path / "quantized"
    run_job(make_job(published, text, folder, "int8_sq"), lambda *_: None)
    found, floats = load(folder), load(original)
    heard = {name for name in floats if ".layers." not in name or "audio_tower" in name}
    assert heard - found.keys() == set()
    assert all(np.array_equal(found[name], floats[name]) for name in heard)
    assert found["model.language_model.layers.1.mlp.up_proj.weight"].dtype == np.int8
    assert open_checkpoint(str(folder)).config["audio_config"]["model_type"] == "qwen3_asr_encoder"


def test_adapters_of_published_names_are_merged(original, published, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", original, targets=("o_proj", "down_proj"))
    expected = reference_of(original, adapter, {"": 2.0}, kind="AutoModelForMultimodalLM")
    path, ids = adapter / "adapter_model.safetensors", np.arange(20) * 7 % 90 + 1
    tensors = load_file(path)
    assert all("model.language_model." in name for name in tensors)
    renamed = {
        name.replace("model.language_model.", "thinker.model."): value
        for name, value in tensors.items()
    }
    save_file(renamed, path)
    options = ExportOptions(dtype="fp32", lora_dir=str(adapter))
    manifest = export_llm(open_checkpoint(str(published)), tmp_path / "bundle", options)
    logits = run_portable(tmp_path / "bundle", manifest, ids, 12)
    np.testing.assert_allclose(logits, logits_of(expected, ids), atol=2e-4)


@pytest.mark.nightly
def test_edgellm_run_takes_both_layouts(original, published, command_here, monkeypatch, tmp_path):
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    path, texts = write_wav(tmp_path / "a.wav", chirp(1.2)), []
    for folder in (original, published):
        result = command_here(
            "edgellm", "run", folder, "w1", "--audio", path, "--maxTokens", 6, "--temperature", 0
        )
        assert result.returncode == 0, result.stderr
        texts.append(result.stdout)
    assert texts[0] == texts[1]
    assert texts[0].strip()


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        ((), {"mtp_num_hidden_layers": 5}, "does not understand: mtp_num_hidden_layers"),
        (("thinker_config",), {"streams": 2}, "does not understand: streams"),
        (("thinker_config", "audio_config"), {"windows": 2}, "does not understand: windows"),
        (("thinker_config", "text_config"), {"gates": True}, "does not understand: gates"),
        (("thinker_config", "text_config"), {"model_type": "qwen2"}, "model_type = 'qwen2' is"),
        (("thinker_config",), {"classify_num": 9}, "is a forced aligner: its timestamps are not"),
        (("thinker_config",), {"text_config": 3}, "text_config should be dict, found 3"),
        (("thinker_config",), {"audio_config": None}, "config.json has no audio_config"),
    ],
)
def test_configs_that_are_rejected(published, command_here, tmp_path, place, change, message):
    folder = tmp_path / "model"
    shutil.copytree(published, folder)
    config = json.loads((folder / "config.json").read_text())
    values = config
    for key in place:
        values = values[key]
    values.update(change)
    (folder / "config.json").write_text(json.dumps(config))
    product = "audio" if "audio_config" in place else "llm"
    result = command_here(
        "edgellm-export", product, "--model_dir", folder, "--output_dir", tmp_path / "out"
    )
    assert_one_line_error(result, message)
    assert not (tmp_path / "out").exists()
