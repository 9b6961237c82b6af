"""Ropes of GGUF files as llama.cpp computes them, and its default splitting of text.

llama.cpp treats a factor without a type as linear, combines `rope_freqs` with scaling, and reads
`rope.scale_linear` if there is no `rope.scaling.factor`. RoPE types of transformers are compared
with it, the others with this arithmetic.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import regex
import torch
from conftest import make_checkpoint
from gguf_files import CASES, write_gguf, write_words
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import Rope, read_rope
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.verify import run_portable

FACTORS = [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    made = {}

    def load(case, **rope):
        key = case, json.dumps(rope)
        if key not in made:
            extra = {"rope_parameters": {"rope_theta": 1e4, **rope}} if rope else {}
            folder = make_checkpoint(tmp_path_factory.mktemp(case), **{**CASES[case][1], **extra})
            made[key] = AutoModelForCausalLM.from_pretrained(folder)
        return made[key]

    return load


def rope_of(path) -> Rope:
    return read_rope(ConfigReader(open_checkpoint(str(path)).config), 16, 128)


def with_factors(monkeypatch):
    """Files of llama have `rope_freqs`, as llama.cpp's converter writes them for Llama 3.1."""
    import gguf_files

    plain = gguf_files.tensors
    monkeypatch.setattr(
        gguf_files,
        "tensors",
        lambda arch, model: {
            **plain(arch, model),
            "rope_freqs.weight": np.asarray(FACTORS, np.float32),
        },
    )


def scaled(extra: dict, factors: list[float]) -> np.ndarray:
    """Angles of a step by llama.cpp's rule: frequencies over factors, mixed with their scaled."""
    dim, theta = 16, 1e4
    turning = theta ** (-np.arange(0, dim, 2) / dim) / np.asarray(factors)
    kind = extra.get("rope__scaling__type", "linear")
    factor = extra.get("rope__scaling__factor", extra.get("rope__scale_linear", 1.0)) or 1.0
    if kind == "none":
        return turning
    if kind == "linear":
        return turning / factor
    original = extra["rope__scaling__original_context_length"]

    def pair(rotations):
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), dim - 1)
    mix = 1 - np.clip((np.arange(dim // 2) - low) / max(0.001, high - low), 0, 1)
    return turning / factor * (1 - mix) + turning * mix


_YARN = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 32,
}
SCALINGS = [
    {},
    {"rope__scaling__factor": 4.0},
    {"rope__scaling__factor": 0.0},
    {"rope__scaling__factor": 4.0, "rope__scaling__finetuned": True},
    {"rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32},
    {"rope__scaling__type": "linear", "rope__scaling__factor": 2.5},
    {"rope__scaling__type": "none", "rope__scaling__factor": 4.0},
    {"rope__scaling__type": "none", "rope__scale_linear": 4.0},
    {"rope__scaling__type": "linear", "rope__scaling__attn_factor": 1.0},
    {"rope__scale_linear": 8.0},
    {"rope__scaling__type": "linear", "rope__scale_linear": 8.0},
    {"rope__scale_linear": 8.0, "rope__scaling__factor": 2.0},
    _YARN,
    {**_YARN, "rope__scaling__yarn_ext_factor": 1.0},
]


@pytest.mark.parametrize("extra", SCALINGS, ids=lambda extra: ",".join(extra) or "silent")
@pytest.mark.parametrize("has_factors", [False, True])
def test_rope_frequencies_follow_the_metadata(tmp_path, tiny, monkeypatch, extra, has_factors):
    if has_factors:
        with_factors(monkeypatch)
    write_gguf(tmp_path / "model.gguf", "llama", tiny("llama"), **extra)
    rope = rope_of(tmp_path / "model.gguf")
    expected = scaled(extra, FACTORS if has_factors else [1.0] * 8)
    np.testing.assert_allclose(rope.inv_freq, expected, rtol=1e-6)
    assert rope.scale == pytest.approx(1 + 0.1 * math.log(4) if "yarn" in extra.values() else 1.0)


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "granite", "olmo2"])
@pytest.mark.parametrize(
    "extra", [{"rope__scaling__factor": 4.0}, {"rope__scale_linear": 4.0}], ids=["factor", "older"]
)
def test_a_rope_factor_without_a_type_is_linear(tmp_path, tiny, case, extra):
    """Logits equal those of transformers with linear RoPE scaling, for all kinds of families."""
    model = tiny(case, rope_type="linear", factor=4.0)
    kept, model.config.rope_parameters = model.config.rope_parameters, {"rope_theta": 1e4}
    try:
        write_gguf(tmp_path / "model.gguf", CASES[case][0], model, **extra)
    finally:
        model.config.rope_parameters = kept
    checkpoint = open_checkpoint(str(tmp_path / "model.gguf"))
    manifest = export_llm(checkpoint, tmp_path / "bundle", ExportOptions(dtype="fp32"))
    ids = np.random.default_rng(3).integers(9, 96, 30)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    found = run_portable(tmp_path / "bundle", manifest, ids, 20)
    np.testing.assert_allclose(found, expected, atol=2e-4)


# llama.cpp's default, one expression after the other; what none matches stays as it is.
_EXPRESSIONS = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
TEXTS = (
    "It's 12345 + 67 = 12412, isn't it?  Yes!\n\n  no",
    "a,b ,c  , d ... $5 <b> x^2 ~ | Größe 👩 日本語、です",
    "tabs\t\tand  trailing   ",
    "٣٤٥ Ⅻ ½ don't DON'T",
)


def pieces(text: str) -> list[str]:
    found = [text]
    for expression in _EXPRESSIONS:
        found = [
            each
            for piece in found
            for each in regex.split(f"({expression})", piece, flags=regex.V0)
            if each
        ]
    return found


@pytest.mark.parametrize("pre", [None, "", "default"])
def test_a_missing_pre_tokenizer_is_reported(tmp_path, tiny, caplog, pre):
    """A file without a pre-tokenizer is reported; llama.cpp warns, too."""

    class Words:
        def __init__(self, writer):
            self._writer = writer

        def __getattr__(self, name):
            return getattr(self._writer, name)

        def add_tokenizer_pre(self, _):
            if pre:
                self._writer.add_tokenizer_pre(pre)

    path = tmp_path / "model.gguf"
    write_gguf(
        path, "llama", tiny("llama"), words=lambda writer, size: write_words(Words(writer), size)
    )
    files = open_checkpoint(str(path)).tokenizer_files
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    for text in TEXTS:
        found = tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert [text[begin:end] for _, (begin, end) in found] == pieces(text)
    said = [record.getMessage() for record in caplog.records]
    assert ["has no tokenizer.ggml.pre" in line for line in said] == ([] if pre else [True])
