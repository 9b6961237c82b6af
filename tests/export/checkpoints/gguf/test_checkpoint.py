"""GGUF files written by the reference library from tiny transformers models."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import assert_one_line_error, make_checkpoint
from gguf_files import CASES, SCORED, TEXTS, write_gguf, write_pieces, write_scored

from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.export.checkpoints.checkpoint import read_whole
from edgellm.export.checkpoints.gguf.tokenizer import _short, convert_tokenizer
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.verify import run_portable


@pytest.mark.parametrize(
    ("case", "quantization"),
    [*((name, None) for name in CASES), ("llama", "F16"), ("gemma2", "Q8_0"), ("llama", "Q4_0")],
)
def test_logits_equal_transformers(tmp_path, case, quantization):
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    arch, config = CASES[case]
    model = AutoModelForCausalLM.from_pretrained(
        make_checkpoint(tmp_path / "hf", **config), attn_implementation="eager"
    )
    write_gguf(tmp_path / "model.gguf", arch, model, quantization)
    if quantization is not None:  # the reference computes with the same rounded weights
        kind = getattr(gguf.GGMLQuantizationType, quantization)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    packed = gguf.quantize(parameter.numpy(), kind)
                    parameter.copy_(torch.from_numpy(gguf.dequantize(packed, kind)))
    checkpoint = open_checkpoint(str(tmp_path / "model.gguf"))
    manifest = export_llm(checkpoint, tmp_path / "bundle", ExportOptions(dtype="fp32"))
    assert manifest.eos_token_ids == (2, 7)
    ids = np.random.default_rng(3).integers(9, 96, 30)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    found = run_portable(tmp_path / "bundle", manifest, ids, 20)
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Callable[[str], Any]:
    """Models of transformers, by the names of `CASES`."""
    from transformers import AutoModelForCausalLM

    def load(case: str) -> Any:
        folder = make_checkpoint(tmp_path_factory.mktemp(case), **CASES[case][1])
        return AutoModelForCausalLM.from_pretrained(folder)

    return load


@pytest.fixture
def split(tiny, tmp_path):
    """A model in three files, as the package gguf divides it, beside the same in one."""
    write_gguf(tmp_path / "whole.gguf", "llama", tiny("llama"), "Q8_0")
    write_gguf(tmp_path / "part.gguf", "llama", tiny("llama"), "Q8_0", max_tensors=10)
    parts = sorted(tmp_path.glob("part-*.gguf"))
    assert parts[2].name == "part-00003-of-00003.gguf"
    return parts


def test_the_files_of_a_split_are_one_model(split, tmp_path):
    whole = open_checkpoint(str(tmp_path / "whole.gguf"))
    for path in (split[0], split[2]):
        found = open_checkpoint(str(path))
        assert found.config == whole.config
        assert found.tokenizer_files == whole.tokenizer_files
        for name, info in whole.blocks.infos().items():
            assert found.blocks.infos()[name] == info
            assert read_whole(found.blocks, name) == read_whole(whole.blocks, name)
        assert found.blocks.infos().keys() == whole.blocks.infos().keys()


def test_a_split_that_is_not_complete_is_rejected(split, tmp_path):
    def fails(path, message):
        with pytest.raises(BrokenArtifactError, match=message):
            open_checkpoint(str(path))

    copy = tmp_path / "model.gguf"
    copy.write_bytes(split[0].read_bytes())
    fails(copy, r"one of 3 files, whose names must end with -00001-of-00003\.gguf")
    last = split[2].read_bytes()
    split[2].write_bytes(split[1].read_bytes())
    fails(split[0], "part-00003-of-00003.gguf says that it is number 1 of 3")
    split[2].unlink()
    fails(split[0], "part-00003-of-00003.gguf is missing")
    split[2].write_bytes(last[:-200])
    fails(split[0], "it ends before")


def test_verify_names_what_joins_a_split(command_here, split, tmp_path):
    flags = ("--model_dir", split[0], "--output_dir", tmp_path / "bundle", "--verify")
    result = command_here("edgellm-export", "llm", *flags)
    assert_one_line_error(result, "transformers reads no GGUF splits", "llama-gguf-split --merge")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("case", "extra", "message"),
    [
        ("llama", {"rope__dimension_count": 8}, "llama.rope.dimension_count = 8, heads have 16"),
        ("qwen3", {"expert_count": 4}, "qwen3.expert_count = 4 is unsupported"),
        ("llama", {"attention__clamp_kqv": 8.0}, "does not understand: llama.attention.clamp_kqv"),
        ("qwen3", {"attention__value_length": 8}, "qwen3.attention.value_length = 8"),
        ("granite", {"rope__scaling__finetuned": False}, "without rope"),
        ("olmo2", {"rope__scaling__type": "longrope"}, "rope scaling 'longrope'"),
        ("phi3_without_window", {"rope__scaling__attn_factor": 1.2}, "attn_factor = 1.2"),
        ("llama", {"rope__scaling__attn_factor": 1.5}, "attn_factor = 1.5 is unsupported"),
        ("phi3", {"rope__scaling__factor": 2.0}, "linear by 2.0 with rope_factors"),
        ("llama", {"rope__scaling__type": "dynamic"}, "rope scaling 'dynamic'"),
        ("qwen2", {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0,
                   "rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor"),
    ],
)  # fmt: skip
def test_unsupported_metadata_is_rejected(tmp_path, tiny, case, extra, message):
    path = tmp_path / "model.gguf"
    write_gguf(path, CASES[case][0], tiny(case), **extra)
    with pytest.raises(UnsupportedModelError, match=message):
        export_llm(open_checkpoint(str(path)), tmp_path / "bundle", ExportOptions(dtype="fp32"))
    assert not (tmp_path / "bundle").exists()


def test_an_architecture_without_a_family_is_rejected(tmp_path, tiny):
    write_gguf(tmp_path / "model.gguf", "llama", tiny("llama"))
    data = (tmp_path / "model.gguf").read_bytes().replace(b"llama", b"bloom")
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(UnsupportedModelError, match="GGUF architecture 'bloom'") as caught:
        open_checkpoint(str(tmp_path / "model.gguf"))
    assert "gpt-oss, granite" in caught.value.hint


def test_yarn_has_the_factor_of_both(tmp_path, tiny):
    """llama.cpp multiplies the file's value by a factor that others include in it."""
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0,
            "rope__scaling__original_context_length": 32}  # fmt: skip
    write_gguf(tmp_path / "a.gguf", "qwen2", tiny("qwen2"), **yarn, rope__scaling__attn_factor=0.5)
    rope = open_checkpoint(str(tmp_path / "a.gguf")).config["rope_parameters"]
    assert rope["attention_factor"] == pytest.approx(0.5 * (1 + 0.1 * np.log(4)))


def test_rope_factors_divide_the_frequencies():
    from edgellm.export.config.reader import ConfigReader
    from edgellm.export.config.rope import read_rope

    factors = [1.0, 1.0, 2.0, 8.0]
    plain = read_rope(ConfigReader({}), 8, 128).inv_freq
    scaled = read_rope(
        ConfigReader({"rope_parameters": {"rope_type": "factors", "factors": factors}}), 8, 128
    ).inv_freq
    np.testing.assert_allclose(scaled, plain / np.array(factors), rtol=1e-6)


def test_a_truncated_header_is_rejected(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF\x03\x00")
    with pytest.raises(BrokenArtifactError, match="not a whole GGUF file"):
        open_checkpoint(str(path))


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory, tiny) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    write_gguf(path, "llama", tiny("llama"))
    return path.read_bytes()


def test_headers_cut_anywhere_are_rejected(tiny_file, tmp_path):
    path = tmp_path / "cut.gguf"
    for length in range(8, 4000, 97):
        path.write_bytes(tiny_file[:length])
        with pytest.raises(BrokenArtifactError, match="not a whole GGUF file"):
            open_checkpoint(str(path))


def test_headers_with_any_byte_changed_are_read_or_rejected_in_one_line(tiny_file, tmp_path):
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
     (4, b"\0\0\0\x03", "big-endian; gguf_convert_endian"), (4, b"\0\0\x03\0", "version 196608")],
)  # fmt: skip
def test_headers_with_wrong_values_are_rejected(tiny_file, tmp_path, place, value, said):
    path = tmp_path / "other.gguf"
    path.write_bytes(tiny_file[:place] + value + tiny_file[place + len(value) :])
    with pytest.raises(BrokenArtifactError, match=said):
        open_checkpoint(str(path))


def test_a_file_cut_inside_its_tensors_is_rejected(tmp_path, smollm2_gguf):
    path = tmp_path / "cut.gguf"
    with smollm2_gguf.open("rb") as stream:
        path.write_bytes(stream.read(20_000_000))
    with pytest.raises(BrokenArtifactError, match="not a whole GGUF file"):
        open_checkpoint(str(path))


def test_unknown_tokenizers_are_rejected():
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen3",
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": [],
    }
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer 'qwen3'") as caught:
        convert_tokenizer(metadata.get)
    assert "qwen2" in caught.value.hint.removeprefix("supported: ").split(", ")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("llama", ["<s>", "▁a", "b"]),  # ▁a scores above ab
        ("gemma4", ["<s>", "▁", "ab"]),  # its merges are stored
    ],
)
def test_sentencepiece_merges_follow_the_scores_or_are_stored(model, expected):
    from tokenizers import Tokenizer

    tokens = ["<unk>", "<s>", "</s>", "<0x41>", "▁", "a", "b", "ab", "▁a"]
    metadata = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.merges": ["a b", "▁ a"],
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0, 0, 0, 0, -9, -8, -7, -3, -2],
        "tokenizer.ggml.token_type": [2, 3, 3, 6, 1, 1, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    files = convert_tokenizer(metadata.get)
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert tokenizer.encode("ab").tokens == expected
    assert tokenizer.encode("A", add_special_tokens=False).tokens == ["▁", "<0x41>"]
    assert tokenizer.decode(tokenizer.encode("ab").ids) == "ab"


@pytest.mark.parametrize(
    ("tokens", "is_short"),
    [
        (["a", "b", "ab", "Ġ", "Ġab"], True),
        (["a", " b", "a b", "c d", " bc d"], False),  # read from texts, the parts would differ
        (["#version", "a", "#versiona"], False),  # a text that begins so is a comment
    ],
)
def test_merges_written_as_texts_are_the_same_merges(tokens, is_short):
    """The library reads both forms, and itself writes pairs."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    known = {token: at for at, token in enumerate(tokens)}
    merges = [(a, b) for a in tokens for b in tokens if a + b in known]
    pairs = Tokenizer(BPE(known, merges)).to_str()
    content = _short(pairs)
    assert isinstance(json.loads(content)["model"]["merges"][0], str) is is_short
    assert Tokenizer.from_str(content).to_str() == pairs


class _Kept(dict):
    """A fake writer that records the keys of a tokenizer."""

    def __getattr__(self, name: str) -> Callable[[Any], None]:
        place = _PLACES.get(name, name.removeprefix("add_"))
        return lambda value: self.update({f"tokenizer.ggml.{place}": value})


_PLACES = {"add_tokenizer_model": "model", "add_tokenizer_pre": "pre", "add_token_list": "tokens",
           "add_token_scores": "scores", "add_token_types": "token_type",
           "add_token_merges": "merges", "add_unk_token_id": "unknown_token_id",
           "add_add_space_prefix": "add_space_prefix"}  # fmt: skip
# Parts of TEXTS as llama.cpp splits them (its library of October 2026), at "|".
_DIGITS, _LINES, _SLASHES = (
    " |1|2|3|4|5| x|2",
    " | two|\n\n\n|new|\to|ne|  ",
    "camelCase| //|a|/b|=|1",
)
_LETTERS = "naïve| É| 日本|!?"
_THREE = "it|'s| I|'LL| |123|45| x|2"
CUTS = {
    "gpt-2": ("it|'s| I|'|LL| 12345| x|2", " | two|\n\n|\n|new|\t|o|ne|  ",
              "camelCase| //|a|/|b|=|1", _LETTERS),
    "smollm": (f"it|'s| I|'|LL|{_DIGITS}", " | two|\n\n|\n|new|\t|o|ne|  ",
               "camelCase| //|a|/|b|=|1", _LETTERS),
    "llama-bpe": (_THREE, " | two|\n\n\n|new|\tone|  ", _SLASHES, _LETTERS),
    "dbrx": (_THREE, _LINES, _SLASHES, _LETTERS),
    "qwen2": (f"it|'s| I|'LL|{_DIGITS}", _LINES, _SLASHES, _LETTERS),
    "falcon-h1": (_THREE, " | two|\n\n\n|new|\tone|  ", _SLASHES, _LETTERS),
    "qwen35": (f"it|'s| I|'LL|{_DIGITS}", _LINES, _SLASHES, _LETTERS),
    "seed-coder": (f"it|'s| I|'LL|{_DIGITS}", _LINES, _SLASHES, _LETTERS),
    "hunyuan-dense": (_THREE, _LINES, _SLASHES, "naïve| É| |日本|!?"),
    "gpt-4o": ("it's| I'LL| |123|45| x|2", _LINES, "camel|Case| //|a|/b|=|1", _LETTERS),
    "tekken": (f"it|'s| I|'LL|{_DIGITS}", " | two|\n\n\n|new|\tone|  ",
               "camel|Case| //|a|/b|=|1", _LETTERS),
}  # fmt: skip


@pytest.mark.parametrize("pre", CUTS)
def test_texts_are_cut_as_llama_cpp_cuts_them(pre):
    from tokenizers import Tokenizer

    kept = _Kept()
    write_pieces(kept, pre)
    tokenizer = Tokenizer.from_str(convert_tokenizer(kept.get)["tokenizer.json"].decode())
    for text, cut in zip(TEXTS, CUTS[pre], strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert [tokenizer.decode([each]) for each in ids] == cut.split("|")
    begins = pre in ("llama-bpe", "falcon-h1", "tekken")  # whatever the file says not
    assert (tokenizer.encode("1").ids[0] == 1) is begins


def test_words_of_kimi_are_those_of_its_published_pattern():
    """Of `tokenization_kimi.py`, by another library of regular expressions."""
    import regex
    from tokenizers import Tokenizer

    case = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    letters = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{case}%s[\p{{Ll}}{case}%s"
    words = [f"{letters % ends}(?i:'s|'t|'re|'ve|'m|'ll|'d)?" for ends in (("*", "+"), ("+", "*"))]
    rest = [r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"]
    pattern = regex.compile("|".join([r"[\p{Han}]+", *words, *rest]), regex.VERSION1)
    kept = _Kept()
    write_pieces(kept, "kimi-k2")
    tokenizer = Tokenizer.from_str(convert_tokenizer(kept.get)["tokenizer.json"].decode())
    for text in (*TEXTS, "汉字と日本語ab x汉 don'T CamelCase 12345\n\n  3", "क्या é汉é IT'LL"):
        found = tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert [text[begin:end] for _, (begin, end) in found] == pattern.findall(text)


def test_marks_belong_to_words_since_qwen35():
    from tokenizers import Tokenizer

    cuts = {}
    for pre in ("qwen2", "qwen35"):
        kept = _Kept()
        write_pieces(kept, pre)
        tokenizer = Tokenizer.from_str(convert_tokenizer(kept.get)["tokenizer.json"].decode())
        found = tokenizer.pre_tokenizer.pre_tokenize_str("ab क्या \u0301!")
        cuts[pre] = [place for _, place in found]
    assert cuts["qwen2"] == [(0, 2), (2, 4), (4, 6), (6, 7), (7, 10)]
    assert cuts["qwen35"] == [(0, 2), (2, 7), (7, 9), (9, 10)]


@pytest.mark.parametrize(
    ("has_prefix", "expected"),
    [
        (False, [[262, 263, 264], [260, 269, 261, 268, 262],
                 [264, 261, 259, 198, 172, 270, 262], [266]]),
        (True, [[266, 263, 264], [263, 269, 259, 261, 268, 266],
                [259, 264, 261, 259, 198, 172, 270, 266], [259, 266]]),
    ],
)  # fmt: skip
def test_sentencepiece_ids_are_those_of_llama_cpp(has_prefix, expected):
    from tokenizers import Tokenizer

    kept = _Kept()
    write_scored(kept, has_prefix)
    tokenizer = Tokenizer.from_str(convert_tokenizer(kept.get)["tokenizer.json"].decode())
    texts = ("ab aba", "a  b\n\nab", "bab é<turn>ab", " ab")
    assert [tokenizer.encode(text).ids for text in texts] == [[1, *ids] for ids in expected]
    assert len(SCORED) == tokenizer.get_vocab_size()


_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[(f"tokenizer.ggml.{name}_token_id", -1) for name in _IDS],
        ("tokenizer.ggml.bos_token_id", True),
        ("tokenizer.ggml.eos_token_id", 10**6),
        ("tokenizer.ggml.add_bos_token", "false"),
        ("tokenizer.ggml.add_eos_token", 1),
        ("general.alignment", [32, 32]),
        ("general.alignment", 32.5),
        ("general.alignment", "32"),
    ],
)
def test_values_of_wrong_types_or_bounds_are_rejected(tmp_path, tiny, monkeypatch, key, value):
    """An id of -1 is not the last token, and the text "false" is not true."""
    import gguf

    write_header = gguf.GGUFWriter.write_header_to_file

    def with_value(writer, *arguments):
        kind = gguf.GGUFValueType.get_type(value)
        item = gguf.GGUFValueType.INT32 if isinstance(value, list) else None
        writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value, kind, item)
        write_header(writer, *arguments)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_value)
    write_gguf(tmp_path / "model.gguf", "llama", tiny("llama"))
    with pytest.raises(BrokenArtifactError, match=key.rpartition(".")[2]):
        open_checkpoint(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("kind", ["F64", "I8", "I32", "Q8_1"])
def test_types_that_package_gguf_does_not_decode_are_rejected(tmp_path, tiny, kind):
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[number]

    def zeros(_name: str, array: np.ndarray) -> tuple[np.ndarray, Any]:
        return np.zeros((len(array), array.shape[-1] // values * size), np.uint8), number

    write_gguf(tmp_path / "model.gguf", "llama", tiny("llama"), zeros)
    checkpoint = open_checkpoint(str(tmp_path / "model.gguf"))
    with pytest.raises(UnsupportedModelError, match=f"tensors of type {kind}"):
        export_llm(checkpoint, tmp_path / "bundle", ExportOptions(dtype="fp32"))
    assert not (tmp_path / "bundle").exists()
