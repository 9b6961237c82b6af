"""Embeddings and heads by address, in engines with edgellm's kernels on the fake GPU."""

from __future__ import annotations

import dataclasses
import gc
import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from conftest import make_checkpoint
from eagle_engines import EAGLE3, build_pair
from fake_gpu import FakeDevice, FakeEngine
from harness.models.random_gguf import write_dense
from harness.models.random_weights import SHAPES
from lowered_engines import (
    Lowered,
    LoweredModel,
    lower_for_gpu,
    open_with,
    require_equal_passes,
)

from edgellm.build.plan import Plan
from edgellm.build.tensorrt.lowering.kernel_attention import Kernels
from edgellm.build.tensorrt.lowering.kernel_vocabulary import MAX_HEAD_ROWS, why_not
from edgellm.build.tensorrt.memory_estimate import FullCompiler, Sizes, estimate_graphs
from edgellm.core.graph_io import WEIGHT_TABLE
from edgellm.core.graph_roles import DECODER, DRAFT
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import ADDRESSED_SUFFIX
from edgellm.device_runtime.runners.tensorrt.cuda.weight_table import loaded_bytes
from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import GIVEN
from edgellm.export import models

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(temperature=0)
LOOKUPS = SpecOptions(network=None, lookups=("suffix", "ngram"), tree="fixed", verify_size=8)
PLAN = Plan(max_input_len=48, kv_capacity=96, threads=1, max_verify_tree_size=12, max_batch_size=2)
# Checkpoints by name: a model type and changes of its tiny config, or a type of GGUF.
CHECKPOINTS = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "scaled and capped": ("gemma2", {}),
    "by layer": ("gemma3n_text", {}),
    "Q4_0": ("", {}),
}


def nightly(*names: str):
    return [pytest.param(name, marks=pytest.mark.nightly) for name in names]


@pytest.fixture(
    scope="module", params=["tied", "untied", "Q4_0", *nightly("scaled and capped", "by layer")]
)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name, tmp_path_factory) -> LoweredModel:
    folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
    model_type, changes = CHECKPOINTS[name]
    if model_type:
        sizes = {**models.find(model_type).TINY, **changes}
        return LoweredModel(make_checkpoint(folder / "checkpoint", **sizes), folder, PLAN)
    sizes = {**SHAPES["tiny"], "num_hidden_layers": 2, "vocab_size": 300, "hidden_size": 256}
    sizes |= {"intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    write_dense(sizes, name, folder / "model.gguf")
    return LoweredModel(folder / "model.gguf", folder, PLAN)


def nodes(model: LoweredModel, op_type: str) -> list[dict]:
    found = [node for node in ir.load(model.graph).graph if node.op_type == op_type]
    return [json.loads(node.attributes[GIVEN].as_string()) for node in found]


def test_they_are_no_constants_of_the_plan(model, name):
    """Of tables and heads the engine has one copy each, and of a tied head none."""
    lookups, heads = nodes(model, "look_up_rows"), nodes(model, "head_rows")
    assert len(lookups) == (2 if name == "by layer" else 1)
    assert len(heads) == 1
    assert (heads[0]["matrix"] == lookups[0]["matrix"]) == (name != "untied")
    graph = ir.load(model.graph).graph
    assert WEIGHT_TABLE in {value.name for value in graph.inputs}
    sizes = {given["matrix"]: given["vocab"] * given["hidden"] for given in (*lookups, *heads)}
    bytes_each = 0.5 + 2 / 32 if name == "Q4_0" else 2
    stored = model.graph.with_suffix(ADDRESSED_SUFFIX).stat().st_size
    assert stored == pytest.approx(sum(sizes.values()) * bytes_each, rel=0.05, abs=1200)
    names = "embed_tokens.weight", "embed_tokens_per_layer.weight", "lm_head.weight"
    assert not [each for each in graph.initializers if any(name in str(each) for name in names)]


def test_estimates_of_a_build_leave_them_out(model, name):
    """Full TensorRT holds three copies of constants; of Q4_0 the table as floats, and a head."""
    graph, kernels = ir.load(model.bundle / "model.onnx"), Kernels(sm=110, codes="fp16")
    before, after = (
        estimate_graphs(
            [graph],
            ir.DataType.FLOAT16,
            Sizes(passes=3, rows=48, full=FullCompiler(maps_weights=True), kernels=each),
        )
        for each in (None, kernels)
    )
    given = (*nodes(model, "look_up_rows"), *nodes(model, "head_rows"))
    sizes = {each["matrix"]: each["vocab"] * each["hidden"] for each in given}
    saved, floats = before.peak_build_bytes - after.peak_build_bytes, 2 * sum(sizes.values())
    assert (saved > 3 * floats) if name == "Q4_0" else (saved == 3 * floats)
    assert (before.engine_bytes > after.engine_bytes) == (name == "Q4_0")


def test_passes_equal_the_cpu_engine(model, name):
    """The CPU engine rounds inputs of low-bit layers to 8 bits."""
    require_equal_passes(model, limit=0.1 if name == "Q4_0" else 0.02)


def ask(model: LLM, prompt: str) -> list[int]:
    answer = model.generate(prompt, max_generate_length=8, sampling=GREEDY)
    list(answer)
    return answer.token_ids


def test_outputs_of_batches_and_speculation_equal_plain_ones(model, monkeypatch):
    device = FakeDevice()
    open_with(monkeypatch, lambda *_: model.runners(device), PLAN.max_batch_size)
    prompts = ["w20 w21 w22 w20 w21 w22 w20", " ".join(f"w{at}" for at in range(30, 70)), "w40"]
    llm = LLM(model.engine)
    found = [ask(llm, prompt) for prompt in prompts]
    assert device.captures
    assert [ask(LLM(model.engine, spec=LOOKUPS), prompt) for prompt in prompts] == found
    answers = [llm.generate(each, max_generate_length=8, sampling=GREEDY) for each in prompts]
    for _ in llm.together(answers, PLAN.max_batch_size):
        pass
    assert [each.token_ids for each in answers] == found


def test_a_draft_shares_the_memory_of_its_bases_embedding(tmp_path):
    """It has none of its own; the memory lives as long as an engine that reads it."""
    layout = dataclasses.replace(EAGLE3, head_dim=64)
    pair = build_pair(tmp_path / "pair", layout, dtype="fp16", head_dim=64)
    lowered, device = Lowered(pair, tmp_path, codes="fp16"), FakeDevice()
    paths = [lowered.path(role).with_suffix(ADDRESSED_SUFFIX) for role in (DECODER, DRAFT)]
    assert [loaded_bytes(path, device) for path in paths] == [0, 0]
    engines = [FakeEngine(lowered.path(DECODER), lowered._passes[DECODER], device)]
    spec = lowered.manifest.decoder
    table = 2 * spec.vocab_size * spec.hidden_size
    assert loaded_bytes(paths[1], device) == table
    before = device.free_bytes()
    engines.append(FakeEngine(lowered.path(DRAFT), lowered._passes[DRAFT], device))
    assert before - device.free_bytes() == pytest.approx(paths[1].stat().st_size - table, abs=2000)
    del engines[0]
    gc.collect()
    assert loaded_bytes(paths[1], device) == paths[1].stat().st_size - _header(paths[1])
    engines.clear()
    gc.collect()
    assert [loaded_bytes(path, device) for path in paths] == [0, 0]


def _header(path: Path) -> int:
    """Bytes before the first matrix and between matrices."""
    count = int(np.fromfile(path, np.int64, 1)[0])
    places = np.fromfile(path, "i8, i8, 32u1", count, offset=16 + 32 * count)
    return path.stat().st_size - int((places["f1"] - places["f0"]).sum())


def test_forms_without_kernels_stay_constants(tmp_path):
    """A tied head and its embedding both do."""
    sizes = {**models.find("llama").TINY, "tie_word_embeddings": True}
    model = LoweredModel(make_checkpoint(tmp_path / "checkpoint", **sizes), tmp_path, PLAN)
    portable, target = model.bundle / "model.onnx", tmp_path / "lowered.onnx"
    many = Kernels(sm=110, codes="fp16", head_rows=MAX_HEAD_ROWS + 1)
    (found,) = why_not(ir.load(portable).graph, many).items()
    said = "a pass computes logits of 129 tokens, over 128"
    assert found == ("model.embed_tokens.weight", said)
    assert (
        why_not(ir.load(portable).graph, Kernels(sm=110, codes="fp16", head_rows=MAX_HEAD_ROWS))
        == {}
    )
    lower_for_gpu(portable, target, kernels=many)
    graph = ir.load(target).graph
    assert {node.op_type for node in graph} & {"look_up_rows", "head_rows"} == set()
    assert not target.with_suffix(ADDRESSED_SUFFIX).exists()
    assert WEIGHT_TABLE not in {value.name for value in graph.inputs}
