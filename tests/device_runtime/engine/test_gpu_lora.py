"""LoRA adapters in engines for GPUs: each has a slot, whose index passes get as an input.

ONNX Runtime's graphs for CUDA run on the CPU (`cuda_on_cpu.py`), TensorRT's on a fake GPU
(`fake_gpu.py`).
"""

from __future__ import annotations

import dataclasses
import shutil

import cuda_on_cpu
import numpy as np
import onnx_ir as ir
import pytest
from conftest import make_checkpoint
from fake_gpu import FakeDevice, FakeEngine
from lora_adapters import ADAPTERS, SCALES, logits_of, reference, write_adapter
from lowered_engines import Lowered, lower_for_gpu, open_with
from manifests import read_manifest, write_manifest
from quantized_layouts import LAYOUTS, write_checkpoint

from edgellm.build import onnxruntime_cuda
from edgellm.build.artifact_kinds import read_bundle
from edgellm.build.engine import build_engine
from edgellm.build.lowering.lora import Places, write_adapted_layers
from edgellm.build.plan import Plan
from edgellm.build.tensorrt.lowering.kernel_attention import Kernels
from edgellm.build.tensorrt.profiles import passes_of
from edgellm.core.errors import LimitError
from edgellm.core.graph_roles import DECODER
from edgellm.core.manifest import GraphSpec, with_kv_dtype
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.networks.decoder import SequencePart
from edgellm.device_runtime.runners import tensorrt
from edgellm.device_runtime.runners.tensorrt.kernel_cache import KV_DTYPES
from edgellm.device_runtime.sampling.sampler import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = np.arange(12) * 7 % 90
PROMPT = "w10 w11 w12 w13 w14"
GREEDY = {"sampling": SamplingParams(temperature=0), "max_generate_length": 16}
TREES = SpecOptions(network=None, lookups=("ngram",), tree="fixed")
PLAN = Plan(
    max_input_len=48,
    kv_capacity=64,
    threads=1,
    prefill="auto",
    max_lora_rank=8,
    max_verify_tree_size=12,
)


def _open(engine, folders):
    with cuda_on_cpu.cuda_is_the_cpu():
        llm = LLM(engine)
    for name, folder in folders.items():
        llm.load_adapter(name, folder)
    return llm


@pytest.fixture(scope="module")
def folders(tiny_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(folder / name, tiny_checkpoint, **how) for name, how in ADAPTERS.items()
    }


@pytest.fixture(scope="module")
def engines(tiny_bundle, tmp_path_factory):
    """Engines by batch size."""
    folder, built = tmp_path_factory.mktemp("places"), {}
    for answers in (1, 5):
        plan = dataclasses.replace(PLAN, max_batch_size=answers)
        built[answers] = folder / str(answers)
        cuda_on_cpu.build_base(tiny_bundle, built[answers], plan)
    return built


def _edit_options(engine, **options):
    """Turn the manifest of a CPU engine into one of a GPU engine."""
    found = read_manifest(engine)
    found["options"] |= options
    write_manifest(engine, found)
    return found["options"]


class OnTensorRt:
    """Engines of a bundle for a fake GPU, in an LLM's folder."""

    def __init__(self, bundle, folder, answers, codes=""):
        plan = dataclasses.replace(PLAN, max_batch_size=answers)
        self.folder, graph = folder / "engine", folder / "decoder.onnx"
        built = build_engine("llm", bundle, self.folder, plan, "onnxruntime", lambda _: None)
        options = _edit_options(self.folder, max_loras=4)
        kernels = Kernels(sm=110, codes=codes, sequences=answers) if codes else None
        dtype = ir.DataType.FLOAT16 if codes else ir.DataType.FLOAT
        source = bundle / "model.onnx"
        lower_for_gpu(source, graph, 0, (11, 4), dtype, kernels, PLAN.kv_capacity, Places.of(plan))
        passes = passes_of(DECODER, read_bundle("llm", bundle, plan), plan)
        specs = tuple(GraphSpec("llm.engine", each.max_rows, "fp32") for each in passes)
        spec = with_kv_dtype(built.spec, KV_DTYPES[codes] if codes else "float32")
        self._engine = dataclasses.replace(
            built, graphs={DECODER: specs}, spec=spec, options=options
        )
        self._graph, self._passes = graph, passes

    def open(self, monkeypatch, device, **options):
        """Replace the LLM by one of this engine."""
        loaded = FakeEngine(self._graph, self._passes, device)
        runner = tensorrt.runner_of(DECODER, self._engine, loaded, device)
        open_with(monkeypatch, lambda *_: {DECODER: runner})
        return LLM(self.folder, **options)


@pytest.fixture(scope="module")
def on_tensorrt(tiny_bundle, tmp_path_factory):
    """In float32, one sequence at a time."""
    return OnTensorRt(tiny_bundle, tmp_path_factory.mktemp("tensorrt"), 1)


def _logits(llm, lora=None):
    """Logits of a prompt in two chunks."""
    kv = llm.base.new_kv()
    kv.adapter = None if lora is None else llm._adapters.find(lora)
    pieces = (0, 7), (7, len(TOKENS))
    found = [llm.base.run(TOKENS[a:b], a, np.arange(b - a), kv=kv).logits.copy() for a, b in pieces]
    kv.free()
    return np.concatenate(found)


def _together(llm, names):
    kvs = [llm.base.new_kv() for _ in names]
    for kv, name in zip(kvs, names, strict=True):
        kv.adapter = None if name is None else llm._adapters.find(name)
    parts = [SequencePart(kv, TOKENS, 0, np.arange(12)) for kv in kvs]
    found = [result.logits.copy() for result in llm.base.run_batch(parts)]
    for kv in kvs:
        kv.free()
    return found


def _ids(llm, lora=None, **options):
    answer = llm.generate(PROMPT, lora=lora, **GREEDY, **options)
    for _ in answer:
        pass
    return answer.token_ids


@pytest.mark.parametrize("library", ["onnxruntime", "tensorrt"])
def test_logits_equal_those_of_the_merged_weights(
    engines, on_tensorrt, tiny_checkpoint, folders, library, monkeypatch
):
    if library == "onnxruntime":
        llm = _open(engines[1], {})
    else:
        llm = on_tensorrt.open(monkeypatch, FakeDevice())
    with llm:
        base = _logits(llm)
        for name, folder in folders.items():
            llm.load_adapter(name, folder)
        for name, folder in folders.items():
            expected = logits_of(reference(tiny_checkpoint, folder, {"": SCALES[name]}), TOKENS)
            np.testing.assert_allclose(_logits(llm, name), expected, atol=2e-4)
        assert _logits(llm).tobytes() == base.tobytes()
        expected = [_ids(llm, name) for name in (None, "all")]
    if library == "onnxruntime":
        with cuda_on_cpu.cuda_is_the_cpu():
            llm = LLM(engines[1], spec=TREES)
    else:
        llm = on_tensorrt.open(monkeypatch, FakeDevice(), spec=TREES)
    with llm:  # trees use the adapter of their request
        llm.load_adapter("all", folders["all"])
        assert [_ids(llm, name) for name in (None, "all")] == expected


def test_requests_with_different_adapters_share_passes(engines, folders, tiny_bundle, tmp_path):
    cuda_on_cpu.build_base(
        tiny_bundle, tmp_path / "plain", dataclasses.replace(PLAN, max_lora_rank=0)
    )
    with _open(engines[5], folders) as llm, _open(tmp_path / "plain", {}) as plain:
        asked = dataclasses.replace(PLAN, max_batch_size=5)
        bundle = read_bundle("llm", tiny_bundle, asked)
        predicted = onnxruntime_cuda.estimate(tiny_bundle, bundle, asked).adapter_bytes
        shapes = llm.base._runner._adapters.shapes.values()
        assert predicted == 4 * sum(rows * width for rows, width in shapes)
        names = [None, *folders]
        alone = [_logits(llm, name) for name in names]
        assert _logits(plain).tobytes() == alone[0].tobytes()
        for one, other in zip(_together(llm, names), alone, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)
        answers = [llm.generate(PROMPT, lora=name, **GREEDY) for name in names]
        for _ in llm.together(answers):
            pass
        assert [answer.token_ids for answer in answers] == [_ids(llm, name) for name in names]


def test_draft_trees_use_the_adapter_of_their_request(eagle_pair, tmp_path, monkeypatch):
    """With adapters the host expands the trees; the device's rounds are for other requests."""
    lowered = Lowered(eagle_pair, tmp_path, adapter_rank=4)
    engine = shutil.copytree(eagle_pair.engine, tmp_path / "engine")
    write_adapted_layers(eagle_pair.bundle / "model.onnx", engine)
    _edit_options(engine, max_lora_rank=4, max_loras=4)
    lowered.replace_engines(monkeypatch, device := FakeDevice())
    adapter = write_adapter(tmp_path / "one", eagle_pair.base_checkpoint)
    with LLM(engine, spec=SpecOptions(tree="fixed")) as llm:
        llm.load_adapter("one", adapter)
        plain = [_ids(llm, name, speculative=False) for name in (None, "one")]
        waits = []
        for name, expected in zip((None, "one"), plain, strict=True):
            before = device.waits
            assert _ids(llm, name) == expected
            waits.append(device.waits - before)
        assert plain[0] != plain[1]
        assert waits[0] <= 2 + 16 < waits[1], "a wait for each round, and one for each level"


@pytest.mark.parametrize("layout", ["int4", "gptq-order", "fp8"])
def test_adapters_get_unquantized_activations(layout, folders, tiny_checkpoint, tmp_path):
    """Not smoothed, reordered or quantized ones."""
    meant = write_checkpoint(tiny_checkpoint, tmp_path / "checkpoint", LAYOUTS[layout])
    source = open_checkpoint(str(tmp_path / "checkpoint"))
    export_llm(source, tmp_path / "bundle", ExportOptions(dtype="fp32"))
    cuda_on_cpu.build_base(tmp_path / "bundle", tmp_path / "engine", PLAN)
    with _open(tmp_path / "engine", {"qv": folders["qv"]}) as llm:
        errors = []
        for name, scale in ((None, 0.0), ("qv", SCALES["qv"])):
            model = reference(tiny_checkpoint, folders["qv"], {"": scale}, meant)
            errors.append(np.abs(_logits(llm, name) - logits_of(model, TOKENS)).mean())
    assert errors[1] < 1.5 * errors[0] + 1e-5


def test_slots_are_allocated_and_freed(engines, folders, tiny_checkpoint, tmp_path):
    """During other requests; a fifth adapter gets no slot."""
    more = write_adapter(tmp_path / "more", tiny_checkpoint, seed=5)
    with _open(engines[5], {"all": folders["all"]}) as llm:
        expected = _ids(llm, "all"), _ids(llm)
        answers = [llm.generate(PROMPT, lora=name, **GREEDY) for name in ("all", None)]
        steps = [iter(answer) for answer in answers]
        for each in steps:
            next(each)
        for name in ("wide", "qv", "mlp"):
            llm.load_adapter(name, folders[name])
        with pytest.raises(
            LimitError, match="holds 4 adapters at most, all taken: all, mlp, qv"
        ) as e:
            llm.load_adapter("more", more)
        assert "unload one of them, or build with a larger --maxLoras" in e.value.hint
        wide = _ids(llm, "wide")
        llm.unload_adapter("qv")
        llm.load_adapter("more", more)
        assert _ids(llm, "wide") == wide
        for each in steps:
            for _ in each:
                pass
        assert (answers[0].token_ids, answers[1].token_ids) == expected
        assert _ids(llm, "more") not in (*expected, wide)


def test_several_adapters_share_a_pass_on_tensorrt(tmp_path, monkeypatch):
    """In float16, with edgellm's kernels; the slots of a pass depend on its tokens."""
    config = {**models.find("llama").TINY, "head_dim": 64}
    checkpoint = make_checkpoint(tmp_path / "checkpoint", **config)
    export_llm(open_checkpoint(str(checkpoint)), tmp_path / "bundle", ExportOptions(dtype="fp16"))
    engine, device = OnTensorRt(tmp_path / "bundle", tmp_path, 5, "fp16"), FakeDevice()
    with engine.open(monkeypatch, device) as llm:
        base = _logits(llm)
        for name, how in ADAPTERS.items():
            llm.load_adapter(name, write_adapter(tmp_path / name, checkpoint, **how))
        names = [None, *ADAPTERS]
        alone = [_logits(llm, name) for name in names]
        assert alone[0].tobytes() == base.tobytes()
        large = write_adapter(tmp_path / "large", checkpoint, rank=1, lora_alpha=1e7)
        llm.unload_adapter("qv")
        with pytest.raises(LimitError, match="float16 ends at") as caught:
            llm.load_adapter("large", large)
        assert "--dtype fp32" in caught.value.hint
        llm.load_adapter("qv", tmp_path / "qv")
        passes = device.passes
        for one, other in zip(_together(llm, names), alone, strict=True):
            assert np.abs(one - other).mean() < 0.01
        assert device.passes == passes + 1
        for name, found in zip(ADAPTERS, alone[1:], strict=True):
            wanted = logits_of(reference(checkpoint, tmp_path / name, {"": SCALES[name]}), TOKENS)
            assert np.abs(found - wanted).mean() < 0.02 < np.abs(base - wanted).mean()
        answers = [llm.generate(PROMPT, lora=name, **GREEDY) for name in names]
        for _ in llm.together(answers):
            pass
        assert [answer.token_ids for answer in answers] == [_ids(llm, name) for name in names]
