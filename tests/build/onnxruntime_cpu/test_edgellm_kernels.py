"""Engines with edgellm's own kernels: close to the portable graph, and batch-invariant."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tracemalloc

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from conftest import assert_one_line_error, make_checkpoint
from eagle_engines import BASE_PLAN, draft_plan, export_pair
from eagle_engines import EAGLE3 as LAYOUT
from harness.models.checkpoints import round_checkpoint
from portable import open_portable

from edgellm.build.artifact_kinds import read_bundle
from edgellm.build.engine import build_engine
from edgellm.build.lowering.linears.round_int4 import nearest_int4_rows
from edgellm.build.lowering.linears.weights import LinearWeight, WeightPart, rows_of_int8
from edgellm.build.onnxruntime_cpu import estimate
from edgellm.build.onnxruntime_cpu.edgellm_kernels.pack_weights import form_of, packed_bytes
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
)
from edgellm.core.manifest import LLM_ENGINE, load_engine
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.kernels import library, packed_layout
from edgellm.device_runtime.networks.decoder import open_decoder
from edgellm.device_runtime.request_files.lossless_check import prove
from edgellm.device_runtime.request_files.request_file import Options
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

OWN = CpuOptions("edgellm")
PLAN = Plan(max_input_len=48, kv_capacity=64, threads=1, max_verify_tree_size=12, options=OWN)
# Model, its dtype, blocks of INT4 in the checkpoint (-1: FP8), --quantize, bound: rounding inputs
# to int8 moves logits, by how much of their deviation; portable graphs of fp16 round everywhere.
CASES = {
    "fp16": ("qwen3", "fp16", 0, "none", 5e-3),
    "window fp16": ("mistral", "fp16", 0, "none", 5e-3),
    "int8": ("qwen2", "fp32", 0, "int8", 0.1),
    "int4 blocks of 32": ("llama", "fp32", 32, "auto", 0.1),
    "int4 blocks of 16": ("llama", "fp32", 16, "auto", 0.1),
    "fp8": ("llama", "fp16", -1, "auto", 5e-3),
}
IDS = np.random.default_rng(5).integers(9, 96, 40)


# The same mechanisms as "window fp16" and "int4 blocks of 32"
REPEATS = ("fp16", "int4 blocks of 16")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.nightly] * (name in REPEATS)) for name in CASES],
)
def built(request, tmp_path_factory):
    """An engine, its bundle's portable graph, and the bound."""
    kind, dtype, block, quantize, bound = CASES[request.param]
    folder = tmp_path_factory.mktemp("own")
    checkpoint = make_checkpoint(folder / "checkpoint", **models.find(kind).TINY)
    if block:
        source, checkpoint = checkpoint, folder / "rounded"
        if block > 0:
            round_checkpoint(str(source), checkpoint, block)
        else:
            from quantized_layouts import LAYOUTS, write_checkpoint  # which imports torch

            write_checkpoint(source, checkpoint, LAYOUTS["ct-fp8"])
    export_llm(open_checkpoint(str(checkpoint)), folder / "bundle", ExportOptions(dtype=dtype))
    plan = dataclasses.replace(PLAN, quantize=quantize)
    engine = folder / "engine"
    manifest = build_engine("llm", folder / "bundle", engine, plan, "onnxruntime", lambda _: None)
    return engine, open_decoder(engine, manifest), open_portable(folder / "bundle", 64), bound


def logits(session, sizes) -> np.ndarray:
    """Logits of `IDS`, with prefill in chunks."""
    found, begin = [], 0
    for size in sizes:
        rows = IDS[begin : begin + size]
        found.append(session.run(rows, begin, np.arange(len(rows))).logits.copy())
        begin += size
    return np.concatenate(found)


def test_an_engine_computes_the_portable_graph(built):
    engine, session, portable, bound = built
    expected, found = (logits(each, [len(IDS)]) for each in (portable, session))
    error = np.sqrt(np.mean((expected - found) ** 2)) / expected.std()
    assert error < bound
    nodes = onnx.load(engine / "decode.onnx", load_external_data=False).graph.node
    types = {node.op_type for node in nodes}
    assert {"QuantLinear", "CachedAttention"} <= types
    assert not types & {"MatMul", "MatMulNBits", "GroupQueryAttention", "QuickGelu", "Add"}
    normal = {node.output[0] for node in nodes if node.op_type == "SimplifiedLayerNormalization"}
    assert not normal & {node.input[0] for node in nodes if node.op_type == "QuantLinear"}


def test_pieces_of_a_prompt_have_the_bits_of_the_whole(built):
    _, session, *_ = built
    whole = logits(session, [len(IDS)])
    random = np.random.default_rng(0)
    for _ in range(250):
        cuts = np.sort(random.choice(np.arange(1, len(IDS)), random.integers(1, 12), replace=False))
        assert logits(session, np.diff([0, *cuts, len(IDS)])).tobytes() == whole.tobytes()
    assert logits(session, [1] * len(IDS)).tobytes() == whole.tobytes()


def test_nodes_of_random_trees_have_the_bits_of_plain_decoding(built):
    _, session, *_ = built
    random = np.random.default_rng(1)
    for _ in range(500):
        begin, size = int(random.integers(4, 28)), int(random.integers(2, 13))
        session.run(IDS[:begin], 0, np.array([0]))
        parents = [-1, *(int(random.integers(node)) for node in range(1, size))]
        mask = np.eye(size, dtype=np.bool_)
        for node in range(1, size):
            mask[node] |= mask[parents[node]]
        ids, positions = random.integers(9, 96, size), begin + mask.sum(1) - 1
        tree = session.run(
            ids, begin, np.arange(size), position_ids=positions, tree_mask=mask
        ).logits.copy()
        leaf = int(random.integers(size))
        for depth, node in enumerate(np.flatnonzero(mask[leaf])):
            plain = session.run(ids[[node]], begin + depth, np.array([0])).logits
            assert plain.tobytes() == tree[[node]].tobytes()


@pytest.mark.parametrize(
    ("dtype", "quantize", "copies"),
    [("fp16", "none", 1), ("fp32", "int8", 1), ("fp32", "int4", 2)],
)
def test_a_tied_embedding_is_looked_up_in_packed_weights(
    tiny_checkpoint, tmp_path, dtype, quantize, copies
):
    """A tied embedding shares the head; for INT4 heads it has its own 8-bit table."""
    bundle, engine = tmp_path / "bundle", tmp_path / "engine"
    export_llm(open_checkpoint(str(tiny_checkpoint)), bundle, ExportOptions(dtype=dtype))
    plan = dataclasses.replace(PLAN, quantize=quantize)
    made = build_engine("llm", bundle, engine, plan, "onnxruntime", lambda _: None)
    graph = onnx.load(engine / "decode.onnx", load_external_data=False).graph
    packed = {node.input[1] for node in graph.node if node.op_type in ("LookUp", "QuantLinear")}
    tables = [each for each in packed if "embed" in each or "head" in each]
    assert len(tables) == copies
    (look_up,) = [node for node in graph.node if node.op_type == "LookUp"]
    assert "int4" not in look_up.input[1]
    assert not [node for node in graph.node if node.op_type == "Gather" and "ids" in node.input[1]]
    predicted = estimate(bundle, read_bundle("llm", bundle, plan), plan).engine_bytes
    graphs = sum(made.files[f"decode.{part}"].num_bytes for part in ("onnx", "data"))
    assert predicted == pytest.approx(graphs, rel=0.06)


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_speculation_changes_no_output(quantize, tmp_path):
    pair = export_pair(tmp_path, LAYOUT)
    base = dataclasses.replace(BASE_PLAN, prefill="auto", quantize=quantize, options=OWN)
    build_engine("llm", pair.bundle, pair.engine, base, "onnxruntime", lambda _: None)
    draft = dataclasses.replace(draft_plan("auto"), options=OWN)
    build_engine("draft", pair.draft_bundle, pair.engine, draft, "onnxruntime", lambda _: None)
    nodes = onnx.load(pair.engine / "draft" / "draft.onnx", load_external_data=False).graph.node
    assert {"Picks"} == {node.op_type for node in nodes} & {"Picks", "TopK", "LogSoftmax"}
    requests = [{"messages": [{"role": "user", "content": f"w{n} w20"}]} for n in range(30, 42)]
    with LLM(pair.engine, spec=SpecOptions()) as llm:
        for comparison in prove(llm, Options(max_generate_length=40), requests):
            assert comparison.line().endswith("tokens, identical, equal bits")


@pytest.mark.parametrize("rounds", ["int4", "int8"])
@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_weights_are_rounded_some_channels_at_a_time(rounds, dtype, tmp_path, monkeypatch):
    """Gate and up in pieces: the same bytes as at once, in a fraction of their memory."""
    floats = np.random.default_rng(0).standard_normal((2, 1024, 512), np.float32)
    floats.astype(dtype.numpy()).tofile(tmp_path / "weights")
    floats = floats.astype(dtype.numpy()).astype(np.float32)
    size, shape = int(floats[0].size * dtype.itemsize), ir.Shape([1024, 512])
    parts = [
        WeightPart(kind="dense", shape=(512, 1024), block_size=0, parameter="w", stored=(
            ir.ExternalTensor("weights", i * size, size, dtype, shape=shape, name="w",
                              base_dir=tmp_path),
        )) for i in range(2)
    ]  # fmt: skip
    weight = LinearWeight(tuple(parts))
    form = form_of(weight, rounds=rounds, is_gated=True)
    monkeypatch.setattr(packed_layout, "_WEIGHTS_AT_ONCE", 1 << 15)
    tracemalloc.start()
    pieces = packed_bytes(form, weight, packed_layout.gated_order(1024))
    found = b"".join(pieces)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    rows = np.concatenate(floats)[packed_layout.gated_order(1024)]
    if rounds == "int4":
        codes, scales = nearest_int4_rows(rows, 32)
        codes = codes + np.int16(8)
    else:
        codes, scales = rows_of_int8(rows, 32)
        codes += 128
    multiplier = packed_layout.scale_multiplier(
        float(np.abs(rows).max()) / (7 if rounds == "int4" else 127)
    )
    expected = packed_layout.pack_codes(form, codes.astype(np.uint8), scales, multiplier=multiplier)
    assert found == b"".join(expected)
    assert peak < 2 * len(found) + 2e6


# ------------------------------------------------------------------------- what users can do
def test_unavailable_kernels_are_reported(tiny_bundle, tmp_path, monkeypatch):
    engine = tmp_path / "engine"
    build_engine("llm", tiny_bundle, engine, PLAN, "onnxruntime", lambda _: None)
    for name in ("library_path", "load_library", "instruction_sets"):
        getattr(library, name).cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    try:
        with pytest.raises(BrokenArtifactError, match=r"needs edgellm's kernels: .*no C\+\+") as e:
            open_decoder(engine, load_engine(engine, LLM_ENGINE))
        assert "--kernels onnxruntime" in e.value.hint
        with pytest.raises(EdgeLLMError, match=r"no C\+\+ compiler"):
            build_engine("llm", tiny_bundle, engine, PLAN, "onnxruntime", lambda _: None)
        auto = dataclasses.replace(PLAN, options=CpuOptions())
        made = build_engine("llm", tiny_bundle, engine, auto, "onnxruntime", lambda _: None)
        assert made.options["kernels"] == "onnxruntime"
        (note,) = made.options["notes"]
        assert "no C++ compiler" in note
        assert "apt install g++" in note
        open_decoder(engine, made)
    finally:
        for name in ("library_path", "load_library", "instruction_sets"):
            getattr(library, name).cache_clear()


def test_packed_weights_of_another_layout_are_rejected(tiny_bundle, tmp_path):
    engine = tmp_path / "engine"
    made = build_engine("llm", tiny_bundle, engine, PLAN, "onnxruntime", lambda _: None)
    other = dataclasses.replace(made, options={**made.options, "weight_layout": 99})
    with pytest.raises(BrokenArtifactError, match="layout 99 of edgellm's kernels") as caught:
        open_decoder(engine, other)
    assert "run llm_build" in caught.value.hint


def test_kernels_flag_chooses_operators_and_rejects_contradictions(
    command_here, tiny_bundle, tmp_path
):
    sizes = ("--maxInputLen", 16, "--maxKVCacheCapacity", 32)
    build = ("llm_build", "--onnxDir", tiny_bundle, "--engineDir", tmp_path / "e", *sizes)
    result = command_here(*build, "--kernels", "ours")
    assert_one_line_error(result, "--kernels ours: give auto, edgellm, onnxruntime or tensorrt")
    result = command_here(*build, "--kernels", "edgellm", "--prefill", "int8")
    assert_one_line_error(result, "--prefill int8 needs ONNX Runtime's operators")
    cuda = ("--backend", "onnxruntime", "--device", "cuda")
    result = command_here(*build, "--kernels", "edgellm", *cuda)
    assert_one_line_error(result, "--kernels is not for cuda", "it goes with --device cpu")
    assert not (tmp_path / "e").exists()
    assert command_here(*build, "--kernels", "edgellm").returncode == 0
    options = json.loads((tmp_path / "e" / "manifest.json").read_text())["options"]
    assert options["kernels"] == "edgellm"
    shutil.rmtree(tmp_path / "e")


@pytest.mark.parametrize(("kind", "width"), [("int4", 96), ("int4", 84), ("fp4", 96), ("int8", 84)])
def test_words_hold_the_codes_of_four_inputs_whichever_way_they_are_stored(kind, width):
    """The layout written out: byte i of a word has input i, its high half input i + 4."""
    form = packed_layout.PackedForm(kind=kind, in_features=width, out_features=5, block=32)
    middle, bits = packed_layout.MIDDLES[kind], 8 if kind == "int8" else 4
    codes = np.random.default_rng(0).integers(0, 1 << bits, (5, width), np.uint8)
    padded = np.full((5, 96), middle, np.uint8)
    padded[:, :width] = codes
    inputs = padded.reshape(5, -1, 8 // bits, 4)
    expected = inputs[:, :, 0] if bits == 8 else inputs[:, :, 0] | inputs[:, :, 1] << 4
    expected = expected.reshape(5, -1)
    assert (packed_layout.words_of_codes(form, codes).view(np.uint8) == expected).all()
    columns = packed_layout.words_of_columns(form, np.ascontiguousarray(codes.T))
    assert (np.ascontiguousarray(columns).view(np.uint8) == expected).all()
    if bits == 4 and width == 96:
        pairs = codes[:, ::2] | codes[:, 1::2] << 4
        assert (packed_layout.words_of_pairs(pairs).view(np.uint8) == expected).all()
