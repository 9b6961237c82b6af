"""Image prompts, from files to outputs: greedy token ids equal those of transformers."""

from __future__ import annotations

import base64
import io
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import assert_one_line_error
from image_checkpoints import picture
from vlm_engines import FORMS, Engines, Reference, build_vlm

from edgellm.build.engine import build_engine
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan, image_plan
from edgellm.core.errors import (
    BrokenArtifactError,
    RequestError,
)
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.engine.images import ImageReader
from edgellm.device_runtime.request_files.request_file import Options
from edgellm.device_runtime.request_files.responses import start_request
from edgellm.device_runtime.sampling.sampler import SamplingParams
from edgellm.export import visual
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.visual import VisualOptions, export_visual

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(temperature=0)
SIZES = {"a": (33, 21), "b": (16, 60), "c": (90, 90)}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> dict[str, str]:
    """Paths of three images."""
    folder = tmp_path_factory.mktemp("pictures")
    for name, size in SIZES.items():
        picture(*size, seed=ord(name)).save(folder / f"{name}.png")
    return {name: str(folder / f"{name}.png") for name in SIZES}


@pytest.fixture(scope="module", params=[*visual.supported(), *FORMS])
def engines(request, tmp_path_factory) -> Engines:
    return build_vlm(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llm(engines) -> LLM:
    return LLM(engines.engine, multimodal_engine_dir=engines.visual_engine)


@pytest.fixture(scope="module")
def reference(engines) -> Reference:
    return Reference(engines.checkpoint)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Engines:
    limits = {"max_image_tokens": 120, "max_image_tokens_per_image": 100}
    return build_vlm(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl", **limits)


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _image(source: str) -> dict[str, str]:
    return {"type": "image", "image": source}


def _conversations(pictures: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    a, b, c = (_image(pictures[name]) for name in "abc")
    return {
        "image_first": [{"role": "user", "content": [a, _text("w1 w2")]}],
        "image_last": [{"role": "user", "content": [_text("w3"), b]}],
        "two_images": [{"role": "user", "content": [a, _text("w4 w5"), c, _text("w6")]}],
        "side_by_side": [{"role": "user", "content": [b, a, _text("w7")]}],
        "two_turns": [
            {"role": "user", "content": [a, _text("w8")]},
            {"role": "assistant", "content": "w9 w10"},
            {"role": "user", "content": [_text("w11"), b]},
        ],
        "text_only": [{"role": "user", "content": "w12 w13 w14"}],
    }


KINDS = ("image_first", "image_last", "two_images", "side_by_side", "two_turns", "text_only")


@pytest.mark.each_change(
    "qwen2_5_vl-*", "gemma3-image_first", "gemma4_31b-two_images", "qwen3_5-image_first"
)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_equal_transformers(llm, reference, pictures, kind):
    messages = _conversations(pictures)[kind]
    answer = llm.generate(messages, sampling=GREEDY, max_generate_length=12)
    list(answer)
    sources = [
        item["image"]
        for message in messages
        if isinstance(message["content"], list)
        for item in message["content"]
        if item["type"] == "image"
    ]
    token_id = llm.manifest.decoder.images.token_id
    vocabulary = llm.manifest.decoder.vocab_size
    ids = [token_id if token >= vocabulary else token for token in answer.prompt.token_ids]
    assert (token_id in ids) == bool(sources)
    from PIL import Image

    prepared = [llm.images.processor.prepare(Image.open(path), 200) for path in sources]
    expected = reference.answer(
        ids, [one.pixels for one in prepared], [one.passes or one.grid for one in prepared], 12
    )
    assert answer.token_ids == expected


@pytest.mark.each_change("minicpmv4_7")
def test_tokens_whose_positions_depend_on_an_image_have_other_keys(llm, pictures):
    """The prefix cache never takes them for the same tokens of a text."""
    seen = llm.images.see([pictures["c"]], Path())
    text = llm.images.expand(f"w1 w2 {llm.images.processor.image_token}", seen)
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    prompt = llm.images.prompt(ids, seen)
    if prompt.images.positions is None:
        return
    before = ids.index(llm.manifest.decoder.images.token_id)
    moved = (prompt.images.positions[:, :before] != np.arange(before)).any(axis=0)
    others = [key != token for key, token in zip(prompt.keys[:before], ids, strict=False)]
    assert others == moved.tolist()
    assert moved.any() == (llm.manifest.decoder.images.model_type == "minicpmv4_7")


def test_outputs_depend_on_the_image(llm, pictures):
    """The same text and seed with another image: other features, so other probabilities."""
    warm = SamplingParams(temperature=4.0, top_p=1.0, top_k=0, seed=1)  # few are near 1
    answers = set()
    for name in "abc":
        content = [_image(pictures[name]), _text("w1 w2")]
        answer = llm.generate(
            [{"role": "user", "content": content}], sampling=warm, max_generate_length=12
        )
        list(answer)
        answers.add(tuple(answer.token_ids))
    assert len(answers) > 1


def test_cached_images_are_not_encoded_again(qwen, pictures, monkeypatch):
    llm = LLM(qwen.engine, multimodal_engine_dir=qwen.visual_engine)
    assert llm.images is not None
    runs = []
    encode = llm.images._network.encode
    monkeypatch.setattr(llm.images._network, "encode", lambda x: runs.append(1) or encode(x))
    answers = []
    data = base64.b64encode(Path(pictures["a"]).read_bytes()).decode()
    for source in (pictures["a"], pictures["a"], f"data:image/png;base64,{data}"):
        content = [_image(source), _text("w1")]
        answer = llm.generate([{"role": "user", "content": content}], sampling=GREEDY)
        list(answer)
        answers.append(answer.token_ids)
    assert len(runs) == 1
    assert answers[0] == answers[1] == answers[2]


def test_threads_with_images(qwen, pictures):
    """They share the encoder and the cached features; every output belongs to its image."""
    llm = LLM(qwen.engine, multimodal_engine_dir=qwen.visual_engine)

    def ask(at: int) -> list[int]:
        content = [_image(pictures["abc"[at % 3]]), _text(f"w{at % 6}")]
        sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=at % 6)
        answer = llm.generate(
            [{"role": "user", "content": content}], sampling=sampling, max_generate_length=6
        )
        list(answer)
        return answer.token_ids

    alone = [ask(at) for at in range(6)]
    llm.images._cache._kept.clear()
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(24))) == alone * 4


def test_a_damaged_encoder_is_rejected(qwen, tmp_path):
    folder = Path(shutil.copytree(qwen.visual_engine, tmp_path / "visual"))
    largest = max(folder.glob("*.*"), key=lambda path: path.stat().st_size)
    data = largest.read_bytes()
    middle = len(data) // 2
    largest.write_bytes(data[:middle] + bytes((data[middle] ^ 255,)) + data[middle + 1 :])
    with pytest.raises(BrokenArtifactError, match=f"{largest.name} was changed"):
        LLM(qwen.engine, multimodal_engine_dir=folder)
    LLM(qwen.engine, multimodal_engine_dir=folder, verify=False)


def test_the_oldest_features_are_evicted(qwen, pictures):
    reader = ImageReader(
        folder=qwen.visual_engine, decoder=_decoder(qwen), verify=True, cache_bytes=1
    )
    for name in "aba":
        reader.see([pictures[name]], Path())
        assert len(reader._cache._kept) == 1


def _decoder(engines: Engines):
    from edgellm.core.manifest import LLM_ENGINE, load_engine

    return load_engine(engines.engine, LLM_ENGINE).decoder


def test_too_many_image_tokens_are_rejected(qwen, pictures):
    llm = LLM(qwen.engine, multimodal_engine_dir=qwen.visual_engine)
    content = [_image(pictures["c"]), _image(pictures["c"]), _image(pictures["c"])]
    with pytest.raises(RequestError, match="images have 147 tokens, the engine takes 120"):
        llm.generate([{"role": "user", "content": content}], sampling=GREEDY)


def test_image_tokens_in_the_text_are_rejected(qwen, pictures):
    folders = {"engine_dir": qwen.engine, "multimodal_engine_dir": qwen.visual_engine}
    contents = [_text("<|image_pad|>")], [_image(pictures["a"]), _text("<|image_pad|>")]
    llm = LLM(**folders)
    for content in contents:  # words, unless they are allowed to be more
        messages = [{"role": "user", "content": content}]
        asked = llm.generate(messages, sampling=GREEDY).prompt
        by_file = start_request(llm, Options(), {"messages": messages}, 0).answer.prompt
        assert asked.token_ids == by_file.token_ids
        assert max(asked.token_ids) < llm.manifest.decoder.vocab_size + 49  # rows of the picture
        assert llm.manifest.decoder.images.token_id not in asked.token_ids
    llm = LLM(**folders, allow_special_tokens=True)
    for content in contents:
        with pytest.raises(RequestError, match=r"[12] places for images"):
            llm.generate([{"role": "user", "content": content}], sampling=GREEDY)


def test_an_encoder_of_another_model_is_rejected(qwen, tiny_engine, tmp_path_factory):
    other = build_vlm(tmp_path_factory.mktemp("other"), "internvl")
    with pytest.raises(BrokenArtifactError, match="the encoder of another model: model internvl"):
        LLM(qwen.engine, multimodal_engine_dir=other.visual_engine)
    with pytest.raises(BrokenArtifactError, match="takes text only"):
        LLM(tiny_engine, multimodal_engine_dir=qwen.visual_engine)
    with pytest.raises(BrokenArtifactError, match="is of kind llm_engine, not visual_engine"):
        LLM(qwen.engine, multimodal_engine_dir=tiny_engine)


def test_image_prompts_share_passes(qwen, pictures, tmp_path):
    """Each output equals the single one, whatever images the other prompts have."""
    several = Plan(
        max_input_len=512,
        kv_capacity=576,
        threads=1,
        prefill="same",
        quantize="none",
        max_batch_size=3,
        options=CpuOptions("edgellm"),
    )
    bundle, passes = qwen.engine.parent / "bundle", list[int]()
    build_engine("llm", bundle, tmp_path / "engine", several, "onnxruntime", lambda _: None)
    llm = LLM(tmp_path / "engine", multimodal_engine_dir=qwen.visual_engine)
    llm.on_pass(lambda answers, _: passes.append(answers))
    asked = [*_conversations(pictures).values()]
    how = {"sampling": GREEDY, "max_generate_length": 12}
    alone = [llm.generate_batch([one], **how)[0].token_ids for one in asked]
    assert {*passes} == {1}
    for order in (asked, asked[::-1]):
        found = llm.generate_batch(order, **how)
        assert [one.token_ids for one in found] == (alone if order is asked else alone[::-1])
    assert passes.count(3) > 12


@pytest.mark.parametrize(("form", "tokens"), [("gemma3", 16), ("gemma4_31b", 280)])
def test_a_chunk_holds_whole_images_whose_tokens_attend_to_each_other(
    pictures, tmp_path, form, tokens
):
    """Gemma's outputs, whatever the chunk size, alone and with others in short passes."""
    gemma = build_vlm(tmp_path, form)
    asked, how = [*_conversations(pictures).values()], {"sampling": GREEDY}
    folders = {"multimodal_engine_dir": gemma.visual_engine}
    llm = LLM(gemma.engine, **folders)
    assert llm.manifest.prefill_rows >= llm.manifest.decoder.images.bidirectional_tokens == tokens
    whole = [one.token_ids for one in llm.generate_batch(asked, max_generate_length=12, **how)]
    for rows in (1, 5, 20):
        llm.kv_cache_manager.prefill_rows = rows
        found = llm.generate_batch(asked, max_generate_length=12, **how)
        assert [one.token_ids for one in found] == whole
    several = Plan(
        max_input_len=512, kv_capacity=576, threads=1, prefill="same", quantize="none",
        max_batch_size=3, options=CpuOptions("edgellm"),
    )  # fmt: skip
    bundle = gemma.engine.parent / "bundle"
    build_engine("llm", bundle, tmp_path / "several", several, "onnxruntime", lambda _: None)
    llm = LLM(tmp_path / "several", max_stall_ms=1e-3, **folders)
    alone = [llm.generate_batch([one], max_generate_length=12, **how)[0] for one in asked]
    assert [one.token_ids for one in alone] == whole
    for order in (asked, asked[::-1]):
        found = llm.generate_batch(order, max_generate_length=12, **how)
        assert [one.token_ids for one in found] == (whole if order is asked else whole[::-1])


@pytest.mark.parametrize(("decoder", "encoder"), [("int8", "none"), ("int8", "fp8")])
def test_decoder_and_encoder_precisions_are_independent(qwen, pictures, tmp_path, decoder, encoder):
    """Any pair generates, and features are those of the encoder's precision."""
    engine, seeing = tmp_path / "engine", tmp_path / "visual_engine"
    plan = Plan(max_input_len=512, kv_capacity=576, threads=1, prefill="same", quantize=decoder)
    build_engine("llm", qwen.engine.parent / "bundle", engine, plan, "onnxruntime", lambda _: None)
    source = open_checkpoint(str(qwen.checkpoint))
    export_visual(source, tmp_path / "bundle", VisualOptions("fp32", quantization=encoder))
    limits = image_plan(1, 120, 100, 1)
    build_engine("visual", tmp_path / "bundle", seeing, limits, "onnxruntime", lambda _: None)
    llm = LLM(engine, multimodal_engine_dir=seeing)
    content = [_image(pictures["a"]), _text("w1 w2")]
    answer = llm.generate([{"role": "user", "content": content}], sampling=GREEDY)
    assert list(answer)
    readers = (
        ImageReader(folder=folder, decoder=llm.manifest.decoder, verify=True)
        for folder in (seeing, qwen.visual_engine)
    )
    found, floats = (reader.see([pictures["a"]], Path())[0].embeds for reader in readers)
    distance = np.linalg.norm(found - floats) / np.linalg.norm(floats)
    assert distance == 0 if encoder == "none" else 1e-3 < distance < 0.1


def _requests(folder: Path, *contents: Any) -> Path:
    document = {
        "max_generate_length": 6,
        "temperature": 0,
        "requests": [{"messages": [{"role": "user", "content": content}]} for content in contents],
    }
    path = folder / "input.json"
    path.write_text(json.dumps(document))
    return path


def test_llm_inference_answers_about_images(command_here, qwen, pictures, tmp_path):
    """Valid requests get outputs, invalid images are reported; the profile counts images."""
    truncated = tmp_path / "truncated.png"
    buffer = io.BytesIO()
    picture(64, 64).save(buffer, "PNG")
    truncated.write_bytes(buffer.getvalue()[: buffer.tell() // 2])
    path = _requests(
        tmp_path,
        [_image(pictures["a"]), _text("w1")],
        [_image(str(tmp_path / "missing.png")), _text("w1")],
        [_image(str(truncated)), _text("w1")],
        [{"type": "audio", "audio": "a.wav"}],
        [_text("w2"), _image(f"file://{pictures['b']}")],
        [{"type": "image"}],
    )
    result = command_here(
        "llm_inference", "--engineDir", qwen.engine, "--multimodalEngineDir", qwen.visual_engine,
        "--inputFile", path, "--outputFile", tmp_path / "out.json",
        "--profileOutputFile", tmp_path / "profile.json",
    )  # fmt: skip
    assert result.returncode == 1
    responses = json.loads((tmp_path / "out.json").read_text())["responses"]
    errors = [response.get("error", {}).get("message", "") for response in responses]
    for at, words in {
        1: "missing.png",
        2: "truncated.png",
        3: "the engine takes no audio",
        5: "an image item needs `image`",
    }.items():
        assert words in errors[at]
    assert errors[0] == errors[4] == ""
    assert responses[0]["messages"][0]["content"][0] == _image(pictures["a"])
    profile = json.loads((tmp_path / "profile.json").read_text())["multimodal"]
    assert profile["total_images"] == 2
    tokens = sum(response.get("prompt_token_count", 0) for response in responses)
    assert 0 < profile["total_image_tokens"] < tokens


def test_images_without_an_encoder(command_here, qwen, tiny_engine, pictures, tmp_path):
    for engine in (qwen.engine, tiny_engine):
        result = command_here(
            "llm_inference", "--engineDir", engine, "--outputFile", tmp_path / "out.json",
            "--inputFile", _requests(tmp_path, [_image(pictures["a"])]),
        )  # fmt: skip
        assert result.returncode == 1
        assert "takes text only" in result.stderr
        assert "--multimodalEngineDir" in result.stderr


def test_a_wrong_folder(command_here, qwen, tmp_path):
    result = command_here(
        "llm_inference", "--engineDir", qwen.engine, "--multimodalEngineDir", tmp_path / "no",
        "--inputFile", _requests(tmp_path, "w1"), "--outputFile", tmp_path / "out.json",
    )  # fmt: skip
    assert_one_line_error(result, "no such folder", "visual_build")


def test_image_tokens_are_never_proposed():
    """Prompt lookup never proposes an image."""
    from edgellm.device_runtime.speculate.draft_cache import ImageIds

    ids = np.array([3, 96, 97, 5])
    assert ImageIds(96, None).for_draft(ids).tolist() == [3, 96, 97, 5]
    assert ImageIds(96, 9).for_draft(ids).tolist() == [3, 9, 9, 5]


def _retrained(source, folder, change):
    """A copy of a checkpoint with tensors changed by `change`."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return open_checkpoint(str(folder))


def _other_encoder(tensors):
    return {name: part * 1.01 if "visual" in name else part for name, part in tensors.items()}


def _other_language_model(tensors):
    return {name: part if "visual" in name else part * 1.01 for name, part in tensors.items()}


def _other_names(tensors):
    """As by another version of transformers, in shards of another order."""
    return {
        name.replace("model.visual.", "visual.", 1): tensors[name]
        for name in sorted(tensors, reverse=True)
    }


@pytest.mark.parametrize(
    ("change", "differs"),
    [(_other_encoder, True), (_other_language_model, False), (_other_names, False)],
)
def test_an_encoder_of_another_checkpoint_gives_a_warning(
    qwen, pictures, tmp_path, caplog, change, differs
):
    """A fine-tune with a frozen encoder has the same hash, as has a checkpoint saved again."""
    other = _retrained(qwen.checkpoint, tmp_path / "checkpoint", change)
    export_visual(other, tmp_path / "bundle", VisualOptions("fp32"))
    limits = image_plan(1, 120, 100, 1)
    seeing = tmp_path / "visual_engine"
    build_engine("visual", tmp_path / "bundle", seeing, limits, "onnxruntime", lambda _: None)
    llm = LLM(qwen.engine, multimodal_engine_dir=seeing)
    warning = f"{seeing} was exported from another encoder"
    assert [warning in record.getMessage() for record in caplog.records] == [True] * differs
    content = [_image(pictures["a"]), _text("w1 w2")]
    with_image = llm.generate([{"role": "user", "content": content}], sampling=GREEDY)
    assert list(with_image)
    assert any(warning in line for line in with_image.warnings) == differs
    without = llm.generate([{"role": "user", "content": "w1 w2"}], sampling=GREEDY)
    assert list(without)
    assert not without.warnings


def test_the_encoder_of_the_same_checkpoint(qwen, caplog):
    assert not LLM(qwen.engine, multimodal_engine_dir=qwen.visual_engine).images.warnings
    assert not caplog.records
