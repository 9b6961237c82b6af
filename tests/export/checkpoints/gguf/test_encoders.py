"""GGUF files of vision-language models: the exports equal those of the Hugging Face checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from conftest import assert_one_line_error, write_tokenizer
from gguf_encoders import ENCODERS, write_encoder, write_vlm
from gguf_text import TEXTS
from PIL import Image
from visual_checkpoints import make_visual_checkpoint, random_pixels

from edgellm.core import graph_io
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import VISUAL_BUNDLE, load_bundle
from edgellm.export import models, visual
from edgellm.export.checkpoints.checkpoint import read_whole
from edgellm.export.checkpoints.vlm import text_tower
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.verify import run_portable
from edgellm.export.pipeline.visual import VisualOptions, export_visual
from edgellm.multimodal import processors
from edgellm.multimodal.patch_grid import grid_inputs

IDS = np.random.default_rng(3).integers(9, 80, 20)
GRID = (4, 6)


def config_of(name: str) -> dict[str, Any]:
    """A tiny model that a file can express."""
    config = json.loads(json.dumps(visual.find(name).TINY))
    if name == "qwen2_5_vl":
        config["vision_config"]["window_size"] = 112  # no file has it
    if name == "gemma3":
        config["text_config"]["layer_types"] = ["sliding_attention"] * 3  # llama.cpp's period is 6
    if name == "gemma4":
        config["vision_config"]["position_embedding_size"] = 560  # for 280 tokens of 4 patches
    if name.startswith("gemma4"):
        config["text_config"]["rope_parameters"] = TEXTS["gemma4"][1]["rope_parameters"]
    if name == "mistral3":
        config["vision_config"]["image_size"] = 80  # its processor's limit, too
        rope = models.find("ministral3").TINY["rope_parameters"]
        config["text_config"]["rope_parameters"] = dict(rope)
    config["text_config"] |= {"bos_token_id": 1, "eos_token_id": 2}
    return config


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints and their files by model type."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(name: str) -> tuple[Path, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            checkpoint = make_visual_checkpoint(folder / "hf", config_of(name))
            write_tokenizer(checkpoint, 96)
            made[name] = checkpoint, write_vlm(folder / "files", checkpoint)
        return made[name]

    return get


def features(source: Path, output: Path) -> list[np.ndarray]:
    """The encoder's outputs for one image, by the portable graph."""
    import onnxruntime

    checkpoint = open_checkpoint(str(source), tokenizer=False)
    export_visual(checkpoint, output, VisualOptions("fp32"))
    spec = load_bundle(output, VISUAL_BUNDLE).vision
    pixels = random_pixels(spec, GRID, 5)
    session = onnxruntime.InferenceSession(
        output / "model.onnx", providers=["CPUExecutionProvider"]
    )
    inputs = {graph_io.PIXEL_VALUES: pixels, **grid_inputs(*GRID, spec)}
    return [np.asarray(each) for each in session.run(None, inputs)]


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_equal_those_of_the_checkpoint(written, tmp_path, name):
    checkpoint, file = written(name)
    expected = features(checkpoint, tmp_path / "expected")
    found = features(file, tmp_path / "found")
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    specs = [load_bundle(tmp_path / each, VISUAL_BUNDLE).vision for each in ("found", "expected")]
    assert specs[0] == specs[1]


@pytest.mark.parametrize("name", ENCODERS)
def test_language_models_equal_those_of_the_checkpoint(written, tmp_path, name):
    checkpoint, file = written(name)
    outputs = []
    for title, source in (("expected", checkpoint), ("found", file)):
        folder = tmp_path / title
        manifest = export_llm(open_checkpoint(str(source)), folder, ExportOptions(dtype="fp32"))
        outputs.append((run_portable(folder, manifest, IDS, 12), manifest.decoder))
    (expected, spec), (found, own) = outputs
    np.testing.assert_allclose(found, expected, atol=2e-4)
    assert own.images == spec.images
    assert own == spec


@pytest.mark.parametrize("name", ENCODERS)
def test_images_are_prepared_by_the_facts_of_the_file(written, tmp_path, name):
    checkpoint, file = written(name)
    opened = open_checkpoint(str(file))
    export_visual(opened, tmp_path / "found", VisualOptions("fp32"))
    image = json.loads((tmp_path / "found/preprocessor_config.json").read_text())
    published = json.loads((checkpoint / "preprocessor_config.json").read_text())
    limits = {"min_pixels", "max_pixels", "min_patches", "max_patches", "min_tiles", "max_tiles"}
    limits |= {"min_image_tokens", "max_image_tokens", "tile_size", "max_soft_tokens"}
    for key in ("patch_size", "merge_size", "temporal_patch_size", "size", "max_image_size"):
        if key in image and key in published:
            assert image[key] == published[key]
    picture = Image.fromarray(np.random.default_rng(2).integers(0, 255, (57, 80, 3), np.uint8))
    found = processors.load(tmp_path / "found").prepare(picture)
    export_visual(open_checkpoint(str(checkpoint)), tmp_path / "expected", VisualOptions("fp32"))
    changed = {key: image[key] for key in limits & image.keys()}
    (tmp_path / "expected/preprocessor_config.json").write_text(json.dumps(published | changed))
    expected = processors.load(tmp_path / "expected").prepare(picture)
    np.testing.assert_array_equal(found.pixels, expected.pixels)
    assert (found.grid, found.prompt) == (expected.grid, expected.prompt)


def in_half(_, array):
    return array.astype(np.float16), gguf.GGMLQuantizationType.F16


def in_q8(_, array):
    if array.ndim != 2 or array.shape[-1] % 32:
        return None
    kind = gguf.GGMLQuantizationType.Q8_0
    return gguf.quantize(array, kind), kind


@pytest.mark.parametrize("encode", [in_half, in_q8])
def test_encoders_may_be_stored_in_other_types(written, tmp_path, encode):
    checkpoint, _ = written("qwen3_vl")
    file = write_vlm(tmp_path / "files", checkpoint, encode=encode)
    whole, found = (open_checkpoint(str(each)).tensors for each in (checkpoint, file))
    name = "model.visual.blocks.1.attn.qkv.weight"
    is_half = encode is in_half
    assert found.infos()[name].dtype == ("F16" if is_half else "F32")
    expected = np.frombuffer(read_whole(whole, name), np.float32)
    stored = np.frombuffer(read_whole(found, name), np.float16 if is_half else np.float32)
    np.testing.assert_allclose(stored, expected, atol=1e-2)
    assert stored.size == expected.size
    features(file, tmp_path / "bundle")


def test_older_files_with_swapped_networks_are_read(written, tmp_path, monkeypatch):
    import gguf_encoders

    checkpoint, file = written("qwen2_vl")
    swapped = {"mlp.fc1": "ffn_down", "mlp.fc2": "ffn_up"}
    monkeypatch.setattr(gguf_encoders, "_BLOCK", {**gguf_encoders._BLOCK, **swapped})
    older = write_vlm(tmp_path / "files", checkpoint)
    expected, found = (open_checkpoint(str(each)) for each in (file, older))
    assert found.config == expected.config
    for name in ("model.visual.blocks.0.mlp.fc1.weight", "model.visual.blocks.1.mlp.fc2.bias"):
        assert read_whole(found.tensors, name) == read_whole(expected.tensors, name)


def cut(name, array):
    return (array[:, :16], None) if name == "v.blk.1.ffn_up.weight" else None


def failure(file: Path, mmproj: str = "") -> str:
    """The message of the error that opening a model gives, with its hint."""
    with pytest.raises(EdgeLLMError) as caught:
        open_checkpoint(str(file), mmproj=mmproj)
    assert "\n" not in str(caught.value)
    return f"{caught.value}; {caught.value.hint}"


def test_encoders_of_other_models_are_rejected_if_named(written, tmp_path):
    _, qwen = written("qwen2_vl")
    _, newer = written("qwen3_vl")
    _, tiles = written("idefics3")
    mmproj = "mmproj-model-f32.gguf"
    assert (
        "it is for qwen3vl or qwen3vlmoe or qwen35 or qwen35moe, the language model is qwen2vl"
        in failure(qwen, str(newer.parent / mmproj))
    )
    assert "it holds no visual encoder" in failure(qwen, str(qwen))
    other = config_of("qwen2_vl")
    other["vision_config"]["hidden_size"] = other["text_config"]["hidden_size"] = 96
    wider = write_vlm(tmp_path / "wider", make_visual_checkpoint(tmp_path / "hf", other))
    assert "it gives vectors of 96, the language model has 48" in failure(
        qwen, str(wider.parent / mmproj)
    )
    assert "is a visual encoder without its language model" in failure(tiles.parent / mmproj)
    shallow = config_of("qwen3_vl")
    shallow["vision_config"]["deepstack_visual_indexes"] = [1]
    less = write_vlm(tmp_path / "less", make_visual_checkpoint(tmp_path / "hf3", shallow))
    assert "it has 1 levels of DeepStack, the language model 2" in failure(
        newer, str(less.parent / mmproj)
    )
    assert "--mmproj goes with a .gguf file" in failure(written("qwen2_vl")[0], str(qwen))
    plain = tmp_path / "plain.gguf"
    plain.write_bytes(tiles.read_bytes().replace(b"<image>", b"<imago>"))
    assert "the language model has no token <image>" in failure(plain, str(tiles.parent / mmproj))


def test_damaged_encoders_are_rejected(written, tmp_path):
    checkpoint, file = written("qwen2_5_vl")
    whole = (file.parent / "mmproj-model-f32.gguf").read_bytes()
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(whole[:3000])
    assert "bad.gguf is not a whole GGUF file" in failure(file, str(bad))
    bad.write_bytes(whole.replace(b"clip.vision.n_wa_pattern", b"clip.vision.m_wa_pattern"))
    assert "bad.gguf is no visual encoder: it has no clip.vision.n_wa_pattern" in failure(
        file, str(bad)
    )
    bad.write_bytes(whole.replace(b"qwen2.5vl_merger", b"qwen9.5vl_merger"))
    assert "projector 'qwen9.5vl_merger' (supported: qwen2vl_merger" in failure(file, str(bad))
    write_encoder(bad, "qwen2.5vl_merger", checkpoint, more={"vision.swiglu_clamp": 3.0})
    assert "does not understand: clip.vision.swiglu_clamp" in failure(file, str(bad))
    write_encoder(bad, "qwen2.5vl_merger", checkpoint, more={"vision.n_wa_pattern": 0})
    assert "clip.vision.n_wa_pattern = 0 is not positive" in failure(file, str(bad))
    bad.write_bytes(whole.replace(b"v.blk.1.ln1.weight", b"v.blk.1.lnX.weight"))
    opened = open_checkpoint(str(file), mmproj=str(bad))
    with pytest.raises(EdgeLLMError, match=r"no tensor model\.visual\.blocks\.1\.norm1\.weight"):
        export_visual(opened, tmp_path / "bundle", VisualOptions("fp32"))
    write_encoder(bad, "qwen2.5vl_merger", checkpoint, cut)
    opened = open_checkpoint(str(file), mmproj=str(bad))
    with pytest.raises(EdgeLLMError, match=r"mlp\.up_proj\.weight has shape"):
        export_visual(opened, tmp_path / "bundle", VisualOptions("fp32"))
    assert not (tmp_path / "bundle").exists()


def test_the_file_next_to_a_model_is_found_if_it_fits(written, tmp_path):
    checkpoint, file = written("qwen2_vl")
    _, tiles = written("internvl")
    model = tmp_path / "model.gguf"
    model.write_bytes(file.read_bytes())
    assert open_checkpoint(str(model)).config["model_type"] == "qwen2"
    (tmp_path / "mmproj-other-F16.gguf").write_bytes(
        (tiles.parent / "mmproj-model-f32.gguf").read_bytes()
    )
    assert open_checkpoint(str(model)).config["model_type"] == "qwen2"
    write_encoder(tmp_path / "model-mmproj-F32.gguf", "qwen2vl_merger", checkpoint)
    write_encoder(tmp_path / "model-mmproj-F16.gguf", "qwen2vl_merger", checkpoint, in_half)
    found = open_checkpoint(str(model))
    assert found.config["model_type"] == "qwen2_vl"
    assert found.tensors.infos()["model.visual.merger.mlp.0.weight"].dtype == "F16"
    assert open_checkpoint(str(model), mmproj="none").config["model_type"] == "qwen2"
    write_encoder(tmp_path / "another-mmproj.gguf", "qwen2vl_merger", checkpoint)
    assert "several visual encoders fit" in failure(model)
    named = open_checkpoint(str(model), mmproj=str(tmp_path / "model-mmproj-F32.gguf"))
    assert named.tensors.infos()["model.visual.merger.mlp.0.weight"].dtype == "F32"


def test_a_spare_token_replaces_an_image_token_that_is_missing(written, tmp_path):
    """Gemma 3's files from a SentencePiece model lack the tokens that were added to it."""
    _, file = written("gemma3")
    mmproj = str(file.parent / "mmproj-model-f32.gguf")
    plain = tmp_path / "plain.gguf"
    plain.write_bytes(file.read_bytes().replace(b"<image_soft_token>", b"<a_token_of_words>"))
    assert "the language model has no token <image_soft_token>" in failure(plain, mmproj)
    plain.write_bytes(file.read_bytes().replace(b"<image_soft_token>", b"<unused1234567890>"))
    opened = open_checkpoint(str(plain), mmproj=mmproj)
    assert opened.config["image_token_index"] == 90
    export_visual(opened, tmp_path / "bundle", VisualOptions("fp32"))
    prompt = processors.load(tmp_path / "bundle").prepare(Image.new("RGB", (40, 40))).prompt
    assert prompt.count("<unused1234567890>") == 16


def test_images_of_gemma4_attend_to_each_other_in_models_without_embeddings_by_layer(tmp_path):
    """No file states it; 26B, 31B and 12B are published so, E2B and E4B are not."""
    config = config_of("gemma4")
    config["text_config"] |= {
        "use_bidirectional_attention": "vision",
        "hidden_size_per_layer_input": 0,
    }
    config["vision_config"] |= {"use_clipped_linears": False, "standardize": True}
    checkpoint = make_visual_checkpoint(tmp_path / "hf", config)
    file = write_vlm(tmp_path / "files", checkpoint)
    expected, found = (open_checkpoint(str(each), tokenizer=False) for each in (checkpoint, file))
    assert text_tower(found).images == text_tower(expected).images
    assert text_tower(found).images.bidirectional_tokens == 280
    np.testing.assert_array_equal(
        features(file, tmp_path / "found")[0], features(checkpoint, tmp_path / "expected")[0]
    )


def test_unlike_files_of_gemma4_are_rejected(written, tmp_path):
    checkpoint, file = written("gemma4")
    bad = tmp_path / "bad.gguf"
    write_encoder(bad, "gemma4v", checkpoint, more={"vision.image_mean": [0.5] * 3})
    assert "clip.vision.image_mean = [0.5, 0.5, 0.5] and image_std = [1.0" in failure(
        file, str(bad)
    )
    write_encoder(bad, "gemma4v", checkpoint, more={"vision.use_mask": True})
    assert "does not understand: clip.vision.use_mask" in failure(file, str(bad))
    whole = (file.parent / "mmproj-model-f32.gguf").read_bytes()
    bad.write_bytes(whole.replace(b"v.blk.1.attn_v.output_max", b"v.blk.1.attn_X.output_max"))
    opened = open_checkpoint(str(file), mmproj=str(bad))
    with pytest.raises(EdgeLLMError, match=r"layers\.1\.self_attn\.v_proj\.output_max"):
        export_visual(opened, tmp_path / "bundle", VisualOptions("fp32"))
    bad.write_bytes(whole.replace(b"v.blk.1.attn_q_norm.weight", b"v.blk.1.attn_q_scal.weight"))
    opened = open_checkpoint(str(file), mmproj=str(bad))
    with pytest.raises(EdgeLLMError, match=r"q_norm\.weight"):
        export_visual(opened, tmp_path / "bundle", VisualOptions("fp32"))
    write_encoder(bad, "qwen2vl_merger", written("qwen2_vl")[0], more={"has_audio_encoder": True})
    assert "it has an audio encoder, too" in failure(written("qwen2_vl")[1], str(bad))


def test_commands_take_the_encoder_by_its_name(written, command_here, tmp_path):
    _, file = written("qwen2_vl")
    _, other = written("qwen3_vl")
    model, mmproj = tmp_path / "m.gguf", file.parent / "mmproj-model-f32.gguf"
    model.write_bytes(file.read_bytes())
    flags = ("--model_dir", model, "--output_dir", tmp_path / "bundle", "--dtype", "fp32")
    result = command_here("edgellm-export", "visual", *flags)
    assert_one_line_error(result, "is a text-only model", "--mmproj")
    wrong = other.parent / "mmproj-model-f32.gguf"
    result = command_here("edgellm-export", "visual", *flags, "--mmproj", wrong)
    assert_one_line_error(result, "is not a visual encoder for", "--mmproj")
    result = command_here("edgellm-export", "visual", *flags, "--mmproj", tmp_path / "no.gguf")
    assert_one_line_error(result, "no.gguf", "check the path")
    assert not (tmp_path / "bundle").exists()
    result = command_here("edgellm-export", "visual", *flags, "--mmproj", mmproj)
    assert result.returncode == 0, result.stderr
    assert load_bundle(tmp_path / "bundle", VISUAL_BUNDLE).spec.model_type == "qwen2_vl"
    result = command_here("edgellm-export", "visual", *flags, "--mmproj", mmproj)
    assert "finished already" in result.stdout
    flags = ("--model_dir", file, "--output_dir", tmp_path / "text", "--mmproj", "none")
    assert command_here("edgellm-export", "llm", *flags).returncode == 0
    result = command_here("edgellm-export", "llm", *flags[:4])
    assert_one_line_error(result, "holds another result", "--overwrite")


@pytest.mark.parametrize("name", ["qwen3_vl", "internvl"])
def test_encoders_with_any_byte_changed_are_read_or_rejected_in_one_line(written, tmp_path, name):
    _, file = written(name)
    whole = (file.parent / "mmproj-model-f32.gguf").read_bytes()
    path, random = tmp_path / "changed.gguf", np.random.default_rng(11)
    messages = []
    for place in random.integers(0, 3000, 60):
        data = bytearray(whole)
        data[place] ^= 1 << int(random.integers(0, 8))
        path.write_bytes(data)
        try:
            opened = open_checkpoint(str(file), mmproj=str(path))
            export_visual(opened, tmp_path / "bundle", VisualOptions("fp32"))
            shutil.rmtree(tmp_path / "bundle")
        except EdgeLLMError as error:
            messages.append(str(error))
    assert 20 < len(messages) <= 60
    assert not any("\n" in message for message in messages)
    assert not (tmp_path / "bundle").exists()
