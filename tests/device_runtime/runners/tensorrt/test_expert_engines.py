"""Mixtures of experts on the fake GPU.

Edgellm's kernels know weights by address; TensorRT-RTX's operators have them in the plan.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import onnx_ir as ir
import pytest
from conftest import make_checkpoint
from fake_gpu import FakeDevice
from harness.models.checkpoints import round_checkpoint
from lowered_engines import LoweredModel, open_with, require_equal_passes

from edgellm.build.plan import Plan
from edgellm.core.artifact import hash_file
from edgellm.core.errors import BrokenArtifactError, LimitError
from edgellm.core.graph_io import WEIGHT_TABLE
from edgellm.core.manifest import FileRecord
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.runners import tensorrt
from edgellm.device_runtime.runners.tensorrt.cuda import weight_table
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import ADDRESSED_SUFFIX
from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import GIVEN
from edgellm.export import models

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(temperature=0)
LOOKUPS = SpecOptions(network=None, lookups=("suffix", "ngram"), tree="fixed", verify_size=8)
PLAN = Plan(max_input_len=48, kv_capacity=96, threads=1, max_verify_tree_size=12, max_batch_size=2)
INT4 = "qwen3_moe_int4"
_SIZES = {"nemotron_h": {"mamba_head_dim": 16}}  # kernels take multiples of 8
_RECURRENT = ("qwen3_next", "lfm2_moe", "nemotron_h", "granitemoehybrid")


def words(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


def ask(model: LLM, prompt: str, length: int = 8):
    answer = model.generate(prompt, max_generate_length=length, sampling=GREEDY)
    list(answer)
    return answer


def make(name: str, folder: Path) -> LoweredModel:
    name, _, how = name.partition(" by ")
    config = models.find("qwen3_moe" if name == INT4 else name).TINY
    checkpoint = make_checkpoint(folder / "checkpoint", **{**config, **_SIZES.get(name, {})})
    if name == INT4:
        round_checkpoint(str(checkpoint), folder / "int4", 16)
        checkpoint = folder / "int4"
    answers = 1 if name in _RECURRENT or how else 2
    plan = dataclasses.replace(PLAN, max_batch_size=answers)
    return LoweredModel(checkpoint, folder, plan, codes="" if how else "fp16")


def nightly(*names: str):
    return [pytest.param(name, marks=pytest.mark.nightly) for name in names]


OTHERS = INT4, "mixtral", "gpt_oss", "olmoe", "ernie4_5_moe", *_RECURRENT
# Two tokens of tiny gpt-oss are as likely in float16.
BY_OPERATORS = [f"{name} by operators" for name in OTHERS if name != "gpt_oss"]
_MADE: dict[str, LoweredModel] = {}


@pytest.fixture(scope="module", params=["qwen3_moe", *nightly(*OTHERS)])
def mixture(request, tmp_path_factory) -> LoweredModel:
    """With edgellm's kernels."""
    return made(request.param, tmp_path_factory)


@pytest.fixture(
    scope="module",
    params=["qwen3_moe", "qwen3_moe by operators", *nightly(*OTHERS, *BY_OPERATORS)],
)
def either(request, tmp_path_factory) -> LoweredModel:
    """With edgellm's kernels or TensorRT-RTX's operators."""
    return made(request.param, tmp_path_factory)


def made(name: str, factory: pytest.TempPathFactory) -> LoweredModel:
    if name not in _MADE:
        _MADE[name] = make(name, factory.mktemp(name.replace(" ", "-")))
    return _MADE[name]


def is_rounded(mixture: LoweredModel) -> bool:
    """Whether the CPU engine rounds inputs, to 8 bits with INT4 weights."""
    return mixture.manifest.quantization != "none"


def test_passes_equal_the_cpu_engine(either):
    """A chunk with more pairs of an expert than a program has, a token, a tree."""
    require_equal_passes(either, limit=0.1 if is_rounded(either) else 0.02)


def test_outputs_equal_the_cpu_engine(either, monkeypatch):
    """Requests of a batch, and speculation."""
    device = FakeDevice()
    open_with(monkeypatch, lambda *_: either.runners(device), either.manifest.max_batch_size)
    prompts = [words(20, 21, 22, 20, 21, 22, 20), words(*range(20, 60)), words(40)]
    model = LLM(either.engine)
    found = [ask(model, prompt).token_ids for prompt in prompts]
    assert device.captures
    spoken = LLM(either.engine, spec=LOOKUPS)
    assert [ask(spoken, prompt).token_ids for prompt in prompts] == found
    answers = [model.generate(each, max_generate_length=8, sampling=GREEDY) for each in prompts]
    for _ in model.together(answers, either.manifest.max_batch_size):
        pass
    assert [each.token_ids for each in answers] == found
    monkeypatch.undo()
    if is_rounded(either):
        return
    cpu = LLM(either.engine)
    assert found == [ask(cpu, prompt).token_ids for prompt in prompts]


def test_experts_are_in_their_file_only(mixture):
    graph = ir.load(mixture.graph).graph
    assert WEIGHT_TABLE in {value.name for value in graph.inputs}
    gates = [node for node in graph if node.op_type == "expert_gates"]
    given = [json.loads(node.attributes[GIVEN].as_string()) for node in gates]
    stored = mixture.graph.with_suffix(ADDRESSED_SUFFIX).stat().st_size
    count = sum(each["experts"] * each["hidden"] * each["inner"] for each in given)
    largest = max(value.const_value.nbytes for value in graph.initializers.values())
    assert largest < stored
    bytes_each = {"fp16": 2, "int4": 0.5 + 2 / 16}[given[0]["codes"]]
    matrices = 2 if not mixture.manifest.decoder.model_type.startswith("nemotron") else 1
    assert stored >= (matrices + 1) * count * bytes_each
    assert not any(".experts." in str(name) for name in graph.initializers)


def test_a_damaged_file_is_rejected(mixture, monkeypatch):
    path = mixture.graph.with_suffix(ADDRESSED_SUFFIX)
    whole = path.read_bytes()
    try:
        for damaged in (whole[:40], whole[: len(whole) // 3], b"\1" + whole[1:]):
            path.write_bytes(damaged)
            with pytest.raises(BrokenArtifactError, match="does not hold the weights") as caught:
                mixture.open(FakeDevice())
            assert caught.value.hint == "build the engine again"
        path.unlink()
        with pytest.raises(BrokenArtifactError, match="weights cannot be read"):
            mixture.open(FakeDevice())
    finally:
        path.write_bytes(whole)
    with pytest.raises(BrokenArtifactError, match="is of an older edgellm"):
        weight_table.open_weights({"expert_table": None}, FakeDevice(), path)  # type: ignore - of its name alone
    monkeypatch.setattr(weight_table, "_PIECE_BYTES", 4096)
    mixture.open(FakeDevice())  # in several pieces
    files = {path.name: FileRecord(*dataclasses.astuple(hash_file(path)))}
    engine = dataclasses.replace(mixture.manifest, files=files)
    with pytest.raises(LimitError, match="the engine needs"):
        tensorrt.require_memory(len(whole), engine)
