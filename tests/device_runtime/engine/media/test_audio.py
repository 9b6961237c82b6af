"""Audio in prompts of chat models, against transformers."""

from __future__ import annotations

import base64
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from audio_checkpoints import AudioReference, build_audio_model, make_audio_model
from eagle_engines import EAGLE3
from image_checkpoints import picture
from made_once import made_once
from manifests import read_manifest, write_manifest
from speech_checkpoints import chirp, write_wav
from vlm_engines import Reference

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan, audio_plan, image_plan
from edgellm.core.errors import BrokenArtifactError, RequestError
from edgellm.core.graph_io import INPUT_FEATURES
from edgellm.core.manifest import AUDIO_ENGINE, load_engine
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.networks.encoder import open_encoder
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.export import audio, visual
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.audio import export_audio
from edgellm.export.pipeline.encoder import EncoderOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.visual import VisualOptions, export_visual
from edgellm.multimodal.audio import read_audio
from edgellm.multimodal.audio_features import prepare

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = audio.supported()
ONE = "qwen3_asr"  # for mechanisms that all share
VISION = visual.find("gemma4").TINY["vision_config"]
GREEDY = SamplingParams(temperature=0.0)
SECONDS = (0.3, 1.0, 2.63, 5.2)  # less than the least clip, a chunk, windows of two seconds


def _made(factory, model_type):
    pytest.importorskip("torch")
    return made_once(
        factory, f"audio_{model_type}", lambda folder: build_audio_model(folder, model_type)
    )


@pytest.fixture(scope="module", params=FAMILIES)
def each(request, tmp_path_factory):
    return _made(tmp_path_factory, request.param)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    return _made(tmp_path_factory, ONE)


@pytest.fixture(scope="module")
def reference(each):
    return AudioReference(each.checkpoint)


def _frames(features, model_type):
    """The graph's features of a clip, [frames, mel bins or samples]."""
    if model_type.startswith("gemma4"):
        return features.reshape(-1, features.shape[-1])
    order = (*range(features.ndim - 2), features.ndim - 1, features.ndim - 2)
    return features.transpose(order).reshape(-1, features.shape[-2])


@pytest.mark.parametrize("seconds", SECONDS)
def test_features_and_rows_are_those_of_transformers(each, reference, seconds):
    samples, manifest = chirp(seconds), load_engine(each.audio_engine, AUDIO_ENGINE)
    clip = prepare(samples, manifest.audio_encoder)
    own, wanted = (
        _frames(clip.inputs[INPUT_FEATURES], reference.model_type),
        reference.features(samples),
    )
    np.testing.assert_allclose(own[: len(wanted)], wanted, atol=1e-5)
    rows = open_encoder(each.audio_engine, manifest).encode(clip.inputs)[0]
    expected = reference.rows(samples)
    assert clip.num_tokens == len(expected)
    np.testing.assert_allclose(rows[: clip.num_tokens], expected, atol=2e-4)


def test_greedy_answers_are_those_of_transformers(each, reference, tmp_path):
    path = write_wav(tmp_path / "a.wav", chirp(2.63))
    content = [{"type": "audio", "audio": str(path)}, {"type": "text", "text": "w1 w2"}]
    messages = [{"role": "user", "content": content}]
    with LLM(each.engine, audio_engine_dir=each.audio_engine) as llm:
        output = llm.generate(messages, sampling=GREEDY, max_generate_length=12)
        found = _ids(output)
        text = llm.formatter.format(messages)
    ids, wanted = reference.answer(text, [read_audio(path)], 12)
    assert output.prompt_token_count == len(ids)
    assert found == [token for token in wanted if token != 2]
    assert len(found) > 3


def _messages(*clips, text="w1 w2"):
    items = [{"type": "audio", "audio": str(clip)} for clip in clips]
    return [{"role": "user", "content": [*items, {"type": "text", "text": text}]}]


def _ids(output):
    return [token for step in output for token in step.token_ids]


def test_drafts_of_ngrams_change_no_output(engines, tmp_path):
    path = write_wav(tmp_path / "a.wav", chirp(1.2))
    found = []
    for spec in (None, SpecOptions(network=None, lookups=("ngram",))):
        with LLM(engines.engine, spec=spec, audio_engine_dir=engines.audio_engine) as llm:
            output = llm.generate(_messages(path), sampling=GREEDY, max_generate_length=40)
            found.append(_ids(output))
    assert found[0] == found[1]


@pytest.mark.nightly
def test_eagle_drafts_change_no_output(tmp_path):
    made = build_audio_model(tmp_path, ONE, draft=EAGLE3)
    path, found = write_wav(tmp_path / "a.wav", chirp(1.2)), []
    for spec in (None, SpecOptions(top_k=2, steps=3, verify_size=12)):
        with LLM(made.engine, spec=spec, audio_engine_dir=made.audio_engine) as llm:
            output = llm.generate(_messages(path), sampling=GREEDY, max_generate_length=40)
            found.append(_ids(output))
    assert found[0] == found[1]


def test_clips_are_encoded_once_and_prompts_are_reused(engines, tmp_path, monkeypatch):
    paths = [write_wav(tmp_path / f"{seed}.wav", chirp(1.2, seed)) for seed in (0, 1)]
    with LLM(engines.engine, audio_engine_dir=engines.audio_engine, context_reuse=True) as llm:
        runs, encode = [], llm.audio._network.encode
        monkeypatch.setattr(llm.audio._network, "encode", lambda x: (runs.append(1), encode(x))[1])
        first, again, other = (
            llm.generate(_messages(path), sampling=GREEDY, max_generate_length=8)
            for path in (paths[0], paths[0], paths[1])
        )
        outputs = [_ids(each) for each in (first, again, other)]
    assert len(runs) == 2
    assert outputs[0] == outputs[1]
    with LLM(engines.engine, audio_engine_dir=engines.audio_engine) as llm:
        fresh = llm.generate(_messages(paths[1]), sampling=GREEDY, max_generate_length=8)
        assert outputs[2] == _ids(fresh)  # not of the other clip's KV cache


@pytest.mark.nightly
def test_images_and_audio_share_a_prompt(tmp_path):
    import torch

    checkpoint = make_audio_model(tmp_path / "checkpoint", "gemma4", VISION)
    source, plan = open_checkpoint(str(checkpoint)), Plan(max_input_len=256, kv_capacity=320)
    export_llm(source, tmp_path / "bundle", ExportOptions(dtype="fp32"))
    export_audio(source, tmp_path / "audio_bundle", EncoderOptions("fp32"))
    export_visual(source, tmp_path / "visual_bundle", VisualOptions("fp32"))
    plans = {"llm": replace(plan, quantize="none"), "audio": audio_plan(8, 1)}
    plans["visual"] = image_plan(1, 400, 200, 1)
    for name, own in plans.items():
        bundle = tmp_path / {"llm": "bundle"}.get(name, f"{name}_bundle")
        build_engine(name, bundle, tmp_path / name, own, "onnxruntime", lambda _: None)
    clip, image = write_wav(tmp_path / "a.wav", chirp(1.2)), picture(40, 24)
    image.save(tmp_path / "a.png")
    items = [
        {"type": "audio", "audio": str(clip)},
        {"type": "image", "image": str(tmp_path / "a.png")},
        {"type": "audio", "audio": str(clip)},
    ]
    engines = {"multimodal_engine_dir": tmp_path / "visual", "audio_engine_dir": tmp_path / "audio"}
    messages = [{"role": "user", "content": items}]
    with LLM(tmp_path / "llm", **engines) as llm:
        output = llm.generate(messages, sampling=GREEDY, max_generate_length=12)
        found, text = _ids(output), llm.formatter.format(messages)
        prepared = llm.images.processor.prepare(image, 200)
    reference, seeing = AudioReference(checkpoint), Reference(checkpoint)
    inputs = reference.inputs(reference.placeholder, [read_audio(clip)])
    heard = reference.tokenizer.decode(inputs["input_ids"][0])
    text = text.replace(reference.token, heard).replace("<|image|>", prepared.prompt)
    ids = reference.tokenizer(text, return_tensors="pt")["input_ids"]
    config = reference.model.config
    kinds = torch.where(ids == config.audio_token_id, 3, 0) + (ids == config.image_token_id).long()
    twice = {key: torch.cat([inputs[key]] * 2) for key in ("input_features", "input_features_mask")}
    with torch.no_grad():
        made = reference.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=kinds,
            **twice,
            **seeing._placed_patches([prepared.pixels], [prepared.grid]),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=2,
        )
    assert output.prompt_token_count == ids.shape[1]
    assert found == [token for token in made[0, ids.shape[1] :].tolist() if token != 2]


def test_silence_is_audio(engines, tmp_path):
    path = write_wav(tmp_path / "a.wav", np.zeros(16000, np.float32))
    with LLM(engines.engine, audio_engine_dir=engines.audio_engine) as llm:
        assert len(_ids(llm.generate(_messages(path), max_generate_length=4))) > 0


def test_bad_audio_fails_in_one_line(engines, tmp_path):
    long = write_wav(tmp_path / "long.wav", chirp(9))
    noise = tmp_path / "noise.wav"
    noise.write_bytes(b"no audio" * 99)
    empty = write_wav(tmp_path / "empty.wav", np.zeros(0, np.float32))
    short = write_wav(tmp_path / "a.wav", chirp(1))
    with LLM(engines.engine, audio_engine_dir=engines.audio_engine) as llm:
        for messages, text in (
            (_messages(long), r"has 9\.0 s, the engine takes 8"),
            (_messages(noise), "holds no audio that can be read"),
            (_messages(empty), "has no audio samples"),
            (_messages(tmp_path / "none.wav"), "cannot read .*none.wav"),
            (_messages("http://host/a.wav"), "recordings are not fetched from the network"),
            ([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "no images"),
            ([{"role": "user", "content": [{"type": "audio"}]}], "is not a path or a URI"),
        ):
            with pytest.raises(RequestError, match=text) as caught:
                llm.generate(messages)
            assert "\n" not in str(caught.value)
    with (
        LLM(engines.engine) as llm,
        pytest.raises(RequestError, match="takes text only") as caught,
    ):
        llm.generate(_messages(short))
    assert "--audioEngineDir" in caught.value.hint


def test_engines_of_other_models_are_rejected(engines, tiny_engine, tmp_path):
    with pytest.raises(BrokenArtifactError, match="the engine takes text only: it was not exp"):
        LLM(tiny_engine, audio_engine_dir=engines.audio_engine)
    with pytest.raises(BrokenArtifactError, match="is of kind llm_engine, not audio_engine"):
        LLM(engines.engine, audio_engine_dir=engines.engine)
    other = tmp_path / "audio"
    shutil.copytree(engines.audio_engine, other)
    raw = read_manifest(other)
    raw["spec"]["hidden_size"] = 64
    write_manifest(other, raw)
    with pytest.raises(BrokenArtifactError, match="another model: hidden size 64, the engine has"):
        LLM(engines.engine, audio_engine_dir=other)


def test_request_files_hold_audio(engines, command_here, tmp_path):
    path = write_wav(tmp_path / "a.wav", chirp(1.2))
    data = "data:audio/wav;base64," + base64.b64encode(path.read_bytes()).decode()
    requests = [{"messages": _messages(source)} for source in (path, data, tmp_path / "none.wav")]
    source = tmp_path / "in.json"
    source.write_text(
        json.dumps({"temperature": 0, "max_generate_length": 6, "requests": requests})
    )
    result = command_here(
        "llm_inference", "--engineDir", engines.engine, "--audioEngineDir", engines.audio_engine,
        "--inputFile", source, "--outputFile", tmp_path / "out.json",
    )  # fmt: skip
    assert result.returncode == 1
    first, second, failed = json.loads((tmp_path / "out.json").read_text())["responses"]
    assert first["output_text"] == second["output_text"]
    assert first["prompt_token_count"] == second["prompt_token_count"] > 16
    assert second["messages"][0]["content"][0]["audio"] == "data:audio/wav;base64"
    assert "none.wav" in failed["error"]["message"]
