"""GGUF files written by the reference library from tiny transformers models."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import make_checkpoint
from gguf_files import in_one_format, write_gguf

from edgellm.contract import BrokenArtifactError, EdgeLLMError, UnsupportedModelError
from edgellm.export import models
from edgellm.export.bundle import ExportOptions, export_llm
from edgellm.export.gguf_tokenizer import convert_tokenizer
from edgellm.export.source import open_checkpoint
from edgellm.export.verify import run_portable


@pytest.mark.parametrize("quantization", [None, "F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_logits_equal_transformers(tmp_path, arch, quantization):
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        make_checkpoint(tmp_path / "hf", **{**models.find(arch).TINY, "intermediate_size": 96})
    )
    encode = None if quantization is None else in_one_format(quantization)
    write_gguf(tmp_path / "model.gguf", arch, model, encode)
    if quantization is not None:  # the reference computes with the same rounded weights
        kind = getattr(gguf.GGMLQuantizationType, quantization)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    packed = gguf.quantize(parameter.numpy(), kind)
                    parameter.copy_(torch.from_numpy(gguf.dequantize(packed, kind)))
    checkpoint = open_checkpoint(str(tmp_path / "model.gguf"))
    manifest = export_llm(checkpoint, tmp_path / "bundle", ExportOptions("fp32"))
    assert manifest.eos_token_ids == (2, 7)
    ids = np.random.default_rng(3).integers(9, 96, 30)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    found = run_portable(tmp_path / "bundle", manifest, ids, 20)
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_rope_factors_divide_the_frequencies():
    from edgellm.export.config import ConfigReader
    from edgellm.export.rope import read_rope

    factors = [1.0, 1.0, 2.0, 8.0]
    plain = read_rope(ConfigReader({}), 8, 128).inv_freq
    scaled = read_rope(
        ConfigReader({"rope_parameters": {"rope_type": "factors", "factors": factors}}), 8, 128
    ).inv_freq
    np.testing.assert_allclose(scaled, plain / np.array(factors), rtol=1e-6)


def test_damaged_files(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF\x03\x00")
    with pytest.raises(BrokenArtifactError, match="not a whole GGUF file"):
        open_checkpoint(str(path))


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory) -> bytes:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("gguf")
    checkpoint = make_checkpoint(folder / "hf", **models.find("llama").TINY)
    write_gguf(folder / "a.gguf", "llama", AutoModelForCausalLM.from_pretrained(checkpoint))
    return (folder / "a.gguf").read_bytes()


def test_headers_cut_anywhere(tiny_file, tmp_path):
    path = tmp_path / "cut.gguf"
    for length in range(8, 4000, 97):
        path.write_bytes(tiny_file[:length])
        with pytest.raises(BrokenArtifactError, match="not a whole GGUF file"):
            open_checkpoint(str(path))


def test_headers_with_any_byte_changed_are_read_or_refused_in_one_line(tiny_file, tmp_path):
    path, random = tmp_path / "changed.gguf", np.random.default_rng(11)
    refused = 0
    for place in random.integers(0, 3000, 150):
        data = bytearray(tiny_file)
        data[place] ^= 1 << int(random.integers(0, 8))
        path.write_bytes(data)
        try:
            open_checkpoint(str(path))
        except EdgeLLMError:
            refused += 1
    assert 20 < refused < 150


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [(0, b"GGML", "does not begin with GGUF"), (4, b"\x01\0\0\0", "version 1"),
     (4, b"\0\0\0\x03", "version 50331648")],
)  # fmt: skip
def test_other_files(tiny_file, tmp_path, place, value, said):
    path = tmp_path / "other.gguf"
    path.write_bytes(tiny_file[:place] + value + tiny_file[place + len(value) :])
    with pytest.raises(BrokenArtifactError, match=said):
        open_checkpoint(str(path))


def test_a_file_cut_inside_its_tensors(tmp_path, smollm2_gguf):
    path = tmp_path / "cut.gguf"
    with smollm2_gguf.open("rb") as stream:
        path.write_bytes(stream.read(20_000_000))
    with pytest.raises(BrokenArtifactError, match="not a whole GGUF file"):
        open_checkpoint(str(path))


def test_unknown_tokenizers_are_refused():
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen3",
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": [],
    }
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer 'qwen3'") as caught:
        convert_tokenizer(metadata.get)
    assert "qwen2" in caught.value.hint.removeprefix("supported: ").split(", ")


def test_sentencepiece_merges_follow_the_scores():
    from tokenizers import Tokenizer

    tokens = ["<unk>", "<s>", "</s>", "<0x41>", "▁", "a", "b", "ab", "▁a"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0, 0, 0, 0, -9, -8, -7, -3, -2],
        "tokenizer.ggml.token_type": [2, 3, 3, 6, 1, 1, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    files = convert_tokenizer(metadata.get)
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert tokenizer.encode("ab").tokens == ["<s>", "▁a", "b"]  # ▁a scores above ab
    assert tokenizer.encode("A", add_special_tokens=False).tokens == ["▁", "<0x41>"]
    assert tokenizer.decode(tokenizer.encode("ab").ids) == "ab"
