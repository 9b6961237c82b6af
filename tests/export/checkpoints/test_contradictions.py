"""Checkpoints with contradicting parts: rejected with a name, or reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from conftest import make_checkpoint, write_tokenizer
from quantized_layouts import LAYOUTS, Layout, fp8_channels, write_checkpoint
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.core.manifest import Bundle
from edgellm.device_runtime.text.tokenizer import ChatTokenizer
from edgellm.export import models
from edgellm.export.checkpoints.nonfinite_check import checked
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.verify import verify_bundle
from edgellm.tools.inspection.sources.detect import inspect

WEIGHTS, UP = "model.safetensors", "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def checkpoint(tiny_checkpoint, tmp_path) -> Path:
    """A copy for damage by a test."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def _edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _export(folder: Path, dtype: str = "fp16", **options: object) -> Bundle:
    target = folder.parent / "bundle"
    return export_llm(open_checkpoint(str(folder)), target, ExportOptions(dtype=dtype, **options))


def test_layers_beyond_those_of_the_config_are_rejected(checkpoint):
    _edit_config(checkpoint, num_hidden_layers=2)
    with pytest.raises(BrokenArtifactError, match=r"does not use: model\.layers\.2\.") as caught:
        _export(checkpoint)
    assert "--num_layers 2" in caught.value.hint
    with pytest.raises(BrokenArtifactError, match=r"model\.layers\.2\."):
        _export(checkpoint, num_layers=1)
    _edit_config(checkpoint, num_hidden_layers=3)
    assert _export(checkpoint, num_layers=1).decoder.kv.num_layers == 1


def test_layer_types_of_another_length_are_rejected(tmp_path):
    source = make_checkpoint(tmp_path / "checkpoint", **models.find("qwen3").TINY)
    _edit_config(source, layer_types=["full_attention"] * 2)
    with pytest.raises(UnsupportedModelError, match="layer_types has 2 entries, num_hidden_lay"):
        _export(source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_weights_that_are_not_numbers_are_rejected(checkpoint, dtype, value):
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(checkpoint / WEIGHTS).items()}
    tensors[UP][40, 7] = float(value)
    save_file(tensors, checkpoint / WEIGHTS)
    for precision in ("fp16", "fp32"):
        with pytest.raises(
            BrokenArtifactError, match=f"{UP} holds values that are not n"
        ) as caught:
            _export(checkpoint, precision)
        assert "damaged" in caught.value.hint
    assert not (checkpoint.parent / "bundle").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [65536.0, -70000.0])
def test_weights_that_float16_cannot_hold_are_rejected(checkpoint, dtype, value):
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(checkpoint / WEIGHTS).items()}
    tensors[UP][40, 7] = value
    save_file(tensors, checkpoint / WEIGHTS)
    with pytest.raises(UnsupportedModelError, match=rf"{UP} .* beyond the range of fp16") as caught:
        _export(checkpoint)
    assert "--dtype fp32" in caught.value.hint
    _export(checkpoint, "fp32")


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
def test_every_bit_pattern_near_the_limits_is_classified(stored):
    """Bit tricks against numpy: all 16-bit floats, float32 around the edges."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    kind = {"F16": np.float16, "BF16": ml_dtypes.bfloat16}.get(stored)
    if kind is None:
        edges = np.array([0, 65504, 65519.99, 65520, 3e38, np.inf, np.nan], np.float32)
        values = np.concatenate([edges, -edges])
    else:
        values = bits.view(kind)
    for half in (True, False):
        for value in values[:: 1 if kind is None else 7]:
            with np.errstate(over="ignore", invalid="ignore"):
                meant = np.float16(value) if half else np.float32(value)
            fails = not np.isfinite(meant)
            piece = np.array([1, value, -1], values.dtype)
            pieces = checked("w", stored, [piece.view(np.uint8).data], half=half)
            if fails:
                with pytest.raises(EdgeLLMError, match="w "):
                    list(pieces)
            else:
                assert len(list(pieces)) == 1


@pytest.mark.parametrize(
    "method",
    ["bitsandbytes", "torchao", "mxfp4", "hqq", "aqlm", "eetq", "quanto", "bitnet", "gptq", "fp8"],
)
def test_a_quantization_config_over_floats_is_reported(command_here, checkpoint, tmp_path, method):
    _edit_config(checkpoint, quantization_config={"quant_method": method})
    manifest = _export(checkpoint)
    assert manifest.quantization == "none"
    assert manifest.provenance["quantization_config"].startswith(f"{method}, but")
    if method == "gptq":
        arguments = ("--model_dir", checkpoint, "--output_dir", tmp_path / "out")
        result = command_here("edgellm-export", "llm", *arguments)
        assert result.returncode == 0, result.stderr
        assert "quantization none" in result.stdout
        assert "config.json says gptq, but all exported weights are floats" in result.stderr
        shown = command_here("edgellm-inspect", checkpoint)
        assert "quantization none" in shown.stdout
        assert "config.json says gptq, but" in shown.stdout


def _quantized(source: Path, folder: Path, layout: str, config: dict | None) -> Path:
    write_checkpoint(source, folder, LAYOUTS[layout])
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    _edit_config(folder, quantization_config=config)
    return folder


@pytest.mark.parametrize(
    ("layout", "method"),
    [("gptq", "awq"), ("awq", "hqq"), ("fp8", "quark"), ("ct-fp8", "bitsandbytes"),
     ("ct-int4", "gptq")],
)  # fmt: skip
def test_a_quantization_config_of_another_layout_is_rejected(
    tiny_checkpoint, tmp_path, layout, method
):
    config = {"quant_method": method}
    folder = _quantized(tiny_checkpoint, tmp_path / "checkpoint", layout, config)
    with pytest.raises(UnsupportedModelError, match=f"says {method}, but") as caught:
        _export(folder)
    assert "--ignore_config_keys quantization_config" in caught.value.hint
    _export(folder, ignore_config_keys=("quantization_config",))


@pytest.mark.parametrize(
    ("layout", "method"), [("gptq", "auto-round"), ("awq", "auto-round"), ("fp8", "fp8")]
)
def test_layouts_of_other_quantization_methods_are_read(tiny_checkpoint, tmp_path, layout, method):
    config = {"quant_method": method}
    folder = _quantized(tiny_checkpoint, tmp_path / "checkpoint", layout, config)
    assert _export(folder).quantization == method


def test_tensors_without_a_config_have_a_layout(tiny_checkpoint, tmp_path):
    folder = _quantized(tiny_checkpoint, tmp_path / "checkpoint", "gptq", None)
    assert _export(folder).quantization == "gptq"


def test_fbgemm_fp8_equals_its_dequantized_weights(tiny_checkpoint, tmp_path):
    """One scale for each output; the bound of the inputs' scales at run time is ignored."""

    def write(weight, random):
        tensors, value = fp8_channels(weight, random)
        return {**tensors, "input_scale_ub": np.array([1200], np.float32)}, value

    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    write_checkpoint(tiny_checkpoint, tmp_path / "checkpoint", Layout(write, config))
    manifest = _export(tmp_path / "checkpoint")
    assert manifest.quantization == "fbgemm_fp8"


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_only_zero_biases_of_early_gptq_writers_are_ignored(tiny_checkpoint, tmp_path, value):
    """AutoGPTQ writes a bias for each layer; zeros are ignored, other values are rejected."""
    folder = tmp_path / "checkpoint"
    write_checkpoint(tiny_checkpoint, folder, LAYOUTS["gptq"])
    tensors = load_file(folder / WEIGHTS)
    name = UP.replace("weight", "bias")
    save_file({**tensors, name: torch.full((80,), value).half()}, folder / WEIGHTS)
    if value:
        with pytest.raises(BrokenArtifactError, match=rf"does not use: {name}"):
            _export(folder)
    else:
        assert _export(folder).quantization == "gptq"


@pytest.mark.each_change(
    "int4", "nvfp4", "ct-int4", "awq", "gptq", "auto-round", "fp8-blocks", "int8_sq"
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_weights_count_all_parameters(tiny_checkpoint, tmp_path, name):
    meant = _export(Path(shutil.copytree(tiny_checkpoint, tmp_path / "float")))
    write_checkpoint(tiny_checkpoint, tmp_path / "checkpoint", LAYOUTS[name])
    found = _export(tmp_path / "checkpoint")
    assert found.decoder.num_parameters == meant.decoder.num_parameters
    for folder in ("float", "checkpoint", "bundle"):
        shown = inspect(tmp_path / folder).facts["parameters"]
        assert shown == f"{meant.decoder.num_parameters:,}"


def test_tokens_beyond_the_embedding_are_rejected(checkpoint):
    write_tokenizer(checkpoint, 99)
    with pytest.raises(BrokenArtifactError, match=r"'w98' has id 98, .* has 96 rows") as caught:
        _export(checkpoint)
    assert "resize_token_embeddings" in caught.value.hint
    assert not (checkpoint.parent / "bundle").exists()


@pytest.fixture
def padded(checkpoint) -> Path:
    """A checkpoint whose tokenizer got a token by transformers, without a row for it."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.add_special_tokens({"pad_token": "[PAD]"}) == 1
    assert tokenizer.pad_token_id == 96
    tokenizer.save_pretrained(checkpoint)
    return checkpoint


@pytest.mark.parametrize("is_in_vocabulary", [False, True])
def test_added_tokens_beyond_the_embedding_become_text(
    command_here, padded, tmp_path, is_in_vocabulary
):
    """As llama.cpp's converter does; transformers loads such a model, and fails at the token.

    Gemma 3's tokenizer.json has its image token in the vocabulary, too.
    """
    plain = Tokenizer.from_file(str(padded / "tokenizer.json"))
    texts = ["w9 w95", "w9 [PAD] w10", "[PAD][PAD]"]
    path = padded / "tokenizer.json"
    stored = json.loads(path.read_text())
    assert stored["added_tokens"].pop()["content"] == "[PAD]"
    expected = Tokenizer.from_str(json.dumps(stored))
    if is_in_vocabulary:
        stored = json.loads(path.read_text())
        stored["model"]["vocab"]["[PAD]"] = 96
        path.write_text(json.dumps(stored))
    flags = ["--model_dir", padded, "--output_dir", tmp_path / "out"]
    done = command_here("edgellm-export", "llm", *flags)
    assert done.returncode == 0, done.stderr
    assert "no row for the added tokens '[PAD]'" in done.stderr
    found = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert [found.encode(text).ids for text in texts] == [
        expected.encode(text).ids for text in texts
    ]
    assert found.encode(texts[0]).ids == plain.encode(texts[0]).ids
    assert ChatTokenizer(tmp_path / "out").vocabulary().get("[PAD]") is None


def test_tokens_beyond_the_embedding_that_the_template_writes_are_rejected(padded):
    (padded / "chat_template.jinja").write_text("[PAD]{{ messages[0].content }}")
    with pytest.raises(BrokenArtifactError, match=r"'\[PAD\]', which the chat template writes"):
        _export(padded)


def test_verify_reports_a_config_that_transformers_rejects(checkpoint):
    """An unused key of a type that transformers rejects."""
    _edit_config(checkpoint, attention_dropout="none")
    manifest = _export(checkpoint)
    with pytest.raises(EdgeLLMError, match=r"cannot load .*attention_dropout") as caught:
        verify_bundle(open_checkpoint(str(checkpoint)), checkpoint.parent / "bundle", manifest)
    assert "nothing was written" in caught.value.hint


def test_verify_compares_floats_with_a_quantization_config(checkpoint):
    _edit_config(checkpoint, quantization_config={"quant_method": "bitsandbytes"})
    manifest = _export(checkpoint, "fp32")
    opened = open_checkpoint(str(checkpoint))
    assert "100.0%" in verify_bundle(opened, checkpoint.parent / "bundle", manifest)


@pytest.mark.parametrize(("letters", "made"), [({}, 0), ({"o": 9}, 1)])
def test_verify_without_a_usable_tokenizer_draws_tokens_of_the_vocabulary(
    checkpoint, letters, made
):
    """Its vocabulary has no letters, or one, and no unknown token."""
    path = checkpoint / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **letters}
    tokenizer["model"] = {"type": "BPE", "vocab": vocabulary, "merges": []}
    path.write_text(json.dumps(tokenizer))
    manifest = _export(checkpoint, "fp32")
    opened = open_checkpoint(str(checkpoint))
    verdict = verify_bundle(opened, checkpoint.parent / "bundle", manifest)
    assert f"32 tokens of the vocabulary (the tokenizer makes {made} different ones" in verdict
    assert "100.0%" in verdict


def test_verify_supports_models_of_few_positions(checkpoint):
    _edit_config(checkpoint, max_position_embeddings=5)
    manifest = _export(checkpoint, "fp32")
    opened = open_checkpoint(str(checkpoint))
    verdict = verify_bundle(opened, checkpoint.parent / "bundle", manifest)
    assert "verified on 5 tokens of the vocabulary" in verdict
    assert "100.0%" in verdict


def test_a_lora_adapter_is_rejected_as_a_checkpoint(checkpoint):
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "someone/base"}
    (checkpoint / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(UnsupportedModelError, match="both a LoRA adapter and a model") as caught:
        open_checkpoint(str(checkpoint))
    assert "move adapter_config.json away" in caught.value.hint
    (checkpoint / WEIGHTS).rename(checkpoint / "adapter_model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (checkpoint / name).unlink()
        for read in (lambda: open_checkpoint(str(checkpoint)), lambda: inspect(checkpoint)):
            with pytest.raises(UnsupportedModelError, match="is a LoRA adapter of some") as caught:
                read()
            assert "--lora_dir" in caught.value.hint


@pytest.mark.parametrize(
    ("model_type", "hint"),
    [
        ("gemma5_text", "supported: apertus, arcee, "),
        ("lama", "supported: apertus, arcee, "),
        (
            "cohere",
            "it computes as cohere2 does, but for its norms of queries and keys; supported:",
        ),
    ],
)
def test_errors_name_relatives_of_unknown_architectures(model_type, hint):
    with pytest.raises(UnsupportedModelError, match=f"'{model_type}'") as caught:
        models.find(model_type)
    assert caught.value.hint.startswith(hint)
    assert "nearest" not in caught.value.hint
