"""Peak memory of builds: bounded by the largest weight, and as predicted."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import make_checkpoint
from harness.models.random_gguf import write_dense
from harness.models.random_weights import SHAPES
from harness.timing import module_command, run_process

from edgellm.build import resource_estimate
from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.export import models, visual
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft
from edgellm.export.pipeline.visual import VisualOptions, export_visual

TOLERANCE = 0.25
LENGTHS = "--maxInputLen", 16, "--maxKVCacheCapacity", 32
WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 16000,
}


def _model(folder: Path, family: str, **sizes: object) -> Path:
    return make_checkpoint(folder / "ck", dtype="float16", **{**models.find(family).TINY, **sizes})


def _llm(folder: Path, source: Path) -> tuple[object, ...]:
    """Export a checkpoint; the module and the flags of its build."""
    export_llm(open_checkpoint(str(source)), folder / "bundle", ExportOptions(dtype="fp16"))
    return "edgellm.build.cli", *LENGTHS


def _float(folder: Path) -> tuple[object, ...]:
    return _llm(folder, _model(folder, "llama", **WIDE, num_hidden_layers=2))


def _gguf(folder: Path, kind: str, *, tied: bool = True) -> tuple[object, ...]:
    sizes = {**SHAPES["tiny"], "tie_word_embeddings": tied}
    write_dense(sizes, kind, folder / "model.gguf")
    return _llm(folder, folder / "model.gguf")


def _large_head(folder: Path) -> tuple[object, ...]:
    shape = {**SHAPES["tiny"], "num_hidden_layers": 2, "vocab_size": 64_000}
    write_dense(shape, "Q4_0", folder / "model.gguf")
    return _llm(folder, folder / "model.gguf")


def _mixture(folder: Path) -> tuple[object, ...]:
    sizes = {"hidden_size": 768, "num_experts": 16, "moe_intermediate_size": 512}
    return _llm(folder, _model(folder, "qwen3_moe", **sizes, vocab_size=8000))


def _hybrid(folder: Path) -> tuple[object, ...]:
    return _llm(folder, _model(folder, "lfm2", **{**WIDE, "intermediate_size": 4096}))


def _draft(folder: Path) -> tuple[object, ...]:
    import torch
    from medusa_heads import make_heads

    base = _model(folder, "llama", **{**WIDE, "intermediate_size": 96}, num_hidden_layers=1)
    hidden, vocab = WIDE["hidden_size"], WIDE["vocab_size"]
    tensors = {}
    for head in range(2):
        tensors[f"{head}.0.linear.weight"] = torch.randn(hidden, hidden) / 32
        tensors[f"{head}.0.linear.bias"] = torch.randn(hidden)
        tensors[f"{head}.1.weight"] = torch.randn(vocab, hidden) / 32
    heads = make_heads(folder / "heads", tensors, medusa_num_heads=2)
    checkpoint = open_checkpoint(str(base))
    export_draft(open_draft(str(heads)), checkpoint, folder / "bundle", DraftOptions("fp16"))
    export_llm(checkpoint, folder / "base", ExportOptions(draft_model_dir=str(heads)))
    plan = Plan(max_input_len=16, kv_capacity=32, is_eagle_base=True, max_verify_tree_size=8)
    build_engine("llm", folder / "base", folder / "base_engine", plan, "onnxruntime", print)
    return "edgellm.build.cli", *LENGTHS, "--eagleDraft"


def _visual(folder: Path) -> tuple[object, ...]:
    from visual_checkpoints import make_visual_checkpoint

    config = json.loads(json.dumps(visual.find("idefics3").TINY))
    config["vision_config"] |= {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 2,
    }
    source = make_visual_checkpoint(folder / "ck", config)
    export_visual(
        open_checkpoint(str(source), tokenizer=False), folder / "bundle", VisualOptions("fp32")
    )
    limits = "--minImageTokens", 1, "--maxImageTokens", 64, "--maxImageTokensPerImage", 64
    return "edgellm.build.visual_cli", *limits


MAKERS = {
    "float": _float,
    "GGUF": partial(_gguf, kind="Q4_K"),
    "GGUF of 5 bits": partial(_gguf, kind="Q5_K", tied=False),
    "GGUF of 6 bits": partial(_gguf, kind="Q6_K"),
    "GGUF by a table": partial(_gguf, kind="IQ4_NL"),
    "mixture": _mixture,
    "hybrid": _hybrid,
    "draft": _draft,
    "visual": _visual,
}


def _dry_run(monkeypatch, capsys, module: str, flags: list[object]) -> float:
    """The estimate in MB, said in this process, which has its libraries."""
    monkeypatch.setattr(sys, "argv", [module, *map(str, flags), "--dryRun"])
    monkeypatch.setattr(resource_estimate, "read_bandwidth_bytes_per_s", lambda: 1e10)
    with contextlib.suppress(SystemExit):
        importlib.import_module(module).main()
    said = re.search(r"peak build memory +([\d.]+) MB", capsys.readouterr().out)
    assert said is not None
    return float(said[1])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders with a bundle, and the module and flags of its build, each made once."""
    found = {}

    def make(kind: str) -> tuple[Path, tuple[object, ...]]:
        if kind not in found:
            folder = tmp_path_factory.mktemp(kind)
            make_bundle = _large_head if kind == "large head" else MAKERS[kind]
            found[kind] = folder, make_bundle(folder)
        return found[kind]

    return make


OF_ONNXRUNTIME = {
    "float": [],
    "float, int8": ["--quantize", "int8"],
    "float, int4": ["--quantize", "int4"],
    "large head, same": ["--prefill", "same"],
    "draft": [],
}


@pytest.mark.each_change("GGUF of 6 bits", "draft")
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        *((kind, []) for kind in MAKERS),
        *((kind, ["--kernels", "onnxruntime", *more]) for kind, more in OF_ONNXRUNTIME.items()),
    ],
    ids=[*MAKERS, *(f"{kind}, ONNX Runtime" for kind in OF_ONNXRUNTIME)],
)
def test_a_prediction_is_near_the_measured_peak(made, kind, more, tmp_path, monkeypatch, capsys):
    """Of anonymous memory, that of the interpreter and its libraries included."""
    folder, (module, *flags) = made(kind.partition(",")[0])
    flags += ["--onnxDir", folder / "bundle", "--engineDir", tmp_path / "engine", *more]
    if "--eagleDraft" in flags:
        shutil.copytree(folder / "base_engine", tmp_path / "engine")
    estimated = _dry_run(monkeypatch, capsys, module, flags)
    peak = run_process(*module_command(module, *flags)).anonymous_bytes / 1e6
    assert estimated == pytest.approx(peak, rel=TOLERANCE)


def test_a_build_holds_a_multiple_of_its_largest_weight(tmp_path):
    """One huge weight adds at most two copies of it."""
    huge = {**SHAPES["tiny"], "num_hidden_layers": 1, "vocab_size": 80_000}
    source = tmp_path / "model.gguf"
    write_dense(huge, "Q4_0", source)
    module, *flags = _llm(tmp_path, source)
    flags += ["--onnxDir", tmp_path / "bundle", "--engineDir", tmp_path / "engine"]
    peak = run_process(*module_command(module, *flags)).anonymous_bytes
    largest = 2 * 80_000 * 1024  # in float16
    assert peak < 150e6 + 1.25 * largest


def test_every_part_of_a_weight_is_packed_alike(tmp_path):
    """Columns of 4-bit codes that begin and end within a byte equal those of the whole."""
    import onnx_ir as ir

    from edgellm.build.lowering.weights import stored_array, stored_columns

    codes = np.random.default_rng(0).integers(0, 256, 6 * 5, np.uint8)
    codes.tofile(tmp_path / "codes")
    for dtype in (ir.DataType.INT4, ir.DataType.UINT4):
        tensor = ir.ExternalTensor(
            "codes", 0, 30, dtype, shape=ir.Shape([6, 10]), name="codes", base_dir=tmp_path
        )
        low, high = codes & 15, codes >> 4
        whole = np.stack([low, high], 1).reshape(6, 10).astype(int)
        if dtype == ir.DataType.INT4:
            whole = np.where(whole > 7, whole - 16, whole)
        np.testing.assert_array_equal(stored_array(tensor), whole)
        for first, end in ((0, 10), (1, 4), (2, 9), (5, 6), (9, 10)):
            found = stored_columns(tensor, slice(first, end))
            np.testing.assert_array_equal(found, whole[:, first:end])
