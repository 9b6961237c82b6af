"""LoRA adapters at run time: equal to PEFT, batched, loaded during other requests."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from conftest import make_checkpoint
from eagle_engines import BASE_PLAN, draft_plan
from lora_adapters import (
    ADAPTERS,
    ATTENTION,
    SCALES,
    edit_config,
    logits_of,
    reference,
    write_adapter,
)
from quantized_layouts import LAYOUTS, write_checkpoint
from safetensors.numpy import load_file, save_file

from edgellm.build.artifact_kinds import read_bundle
from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.engine.kv_snapshot import SnapshotFolder
from edgellm.device_runtime.networks.decoder import SequencePart
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
PLAN = dataclasses.replace(
    Plan(max_input_len=48, kv_capacity=64, threads=1, prefill="auto"),
    max_lora_rank=8,
    max_batch_size=5,
)


def _build(bundle, engine, **changes):
    plan = dataclasses.replace(PLAN, **changes)
    build_engine("llm", bundle, engine, plan, "onnxruntime", lambda _: None)
    return engine


@pytest.fixture(scope="module")
def folders(tiny_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(folder / name, tiny_checkpoint, **how) for name, how in ADAPTERS.items()
    }


@pytest.fixture(scope="module")
def engines(tiny_bundle, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted")
    return {
        kind: _build(tiny_bundle, folder / kind, quantize=kind) for kind in ("none", "int8", "int4")
    }


def _open(engine, folders, **options):
    llm = LLM(engine, **options)
    for name, folder in folders.items():
        llm.load_adapter(name, folder)
    return llm


@pytest.fixture
def llm(engines, folders):
    with _open(engines["none"], folders) as llm:
        yield llm


def _logits(llm, lora=None, tokens=TOKENS):
    """Logits of a prompt in two chunks."""
    kv = llm.base.new_kv()
    kv.adapter = None if lora is None else llm._adapters.find(lora)
    pieces = (0, 7), (7, len(tokens))
    found = [llm.base.run(tokens[a:b], a, np.arange(b - a), kv=kv).logits.copy() for a, b in pieces]
    kv.free()
    return np.concatenate(found)


def _ids(llm, lora=None, prompt=PROMPT, **options):
    answer = llm.generate(prompt, lora=lora, **GREEDY, **options)
    for _ in answer:
        pass
    return answer.token_ids


def test_logits_equal_those_of_the_merged_weights(llm, tiny_checkpoint, folders):
    for name, folder in folders.items():
        expected = logits_of(reference(tiny_checkpoint, folder, {"": SCALES[name]}), TOKENS)
        np.testing.assert_allclose(_logits(llm, name), expected, atol=2e-4)


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
def test_adapter_batches_are_batch_invariant(kind, engines, folders, tiny_bundle):
    """And the base's outputs equal those of an engine without adapters."""
    with _open(engines[kind], folders) as llm:
        names = [None, *folders]
        alone = [_logits(llm, name) for name in names]
        kvs = [llm.base.new_kv() for _ in names]
        for kv, name in zip(kvs, names, strict=True):
            kv.adapter = None if name is None else llm._adapters.find(name)
        parts = [SequencePart(kv, TOKENS, 0, np.arange(12)) for kv in kvs]
        together = [result.logits.copy() for result in llm.base.run_batch(parts)]
        for kv in kvs:
            kv.free()
        assert [each.tobytes() for each in together] == [each.tobytes() for each in alone]
        answers = [llm.generate(PROMPT, lora=name, **GREEDY) for name in names]
        for _ in llm.together(answers):
            pass
        assert [answer.token_ids for answer in answers] == [_ids(llm, name) for name in names]
    assert len({each.tobytes() for each in alone}) == len(names)
    folder = engines[kind].parent / f"plain-{kind}"
    plain = _build(tiny_bundle, folder, quantize=kind, max_lora_rank=0)
    with LLM(plain) as llm:
        assert _logits(llm).tobytes() == alone[0].tobytes()


@pytest.mark.parametrize("layout", ["int4", "gptq-order", "fp8"])
def test_adapters_get_unquantized_activations(layout, folders, tiny_checkpoint, tmp_path):
    """Not smoothed, reordered or quantized ones."""
    meant = write_checkpoint(tiny_checkpoint, tmp_path / "checkpoint", LAYOUTS[layout])
    source = open_checkpoint(str(tmp_path / "checkpoint"))
    export_llm(source, tmp_path / "bundle", ExportOptions(dtype="fp32"))
    with _open(_build(tmp_path / "bundle", tmp_path / "engine"), folders) as llm:
        errors = []
        for name, scale in ((None, 0.0), ("qv", SCALES["qv"])):
            model = reference(tiny_checkpoint, folders["qv"], {"": scale}, meant)
            errors.append(np.abs(_logits(llm, name) - logits_of(model, TOKENS)).mean())
    assert errors[1] < 1.5 * errors[0]


def test_prefixes_are_reused_only_for_the_same_adapter(engines, folders, tmp_path):
    with _open(engines["none"], folders) as llm:
        expected = {name: _ids(llm, name) for name in (None, "all", "qv")}

    def reused(llm, lora):
        answer = llm.generate(PROMPT, lora=lora, **GREEDY)
        for _ in answer:
            pass
        assert answer.token_ids == expected[lora]
        return sum(answer.profile.reused_tokens)

    with _open(engines["none"], folders, context_reuse=True) as llm:
        found = [reused(llm, name) for name in ("all", "all", None, None, "qv", "all")]
        # The finished sequence of "all" is still cached for the last.
        assert [bool(rows) for rows in found] == [False, True, False, True, False, True]
    with _open(engines["none"], folders, context_reuse=True) as llm:
        reused(llm, "all")
        contexts = SnapshotFolder(tmp_path, {})
        contexts.save(llm.kv_cache_manager.all_prefixes())
    with _open(engines["none"], folders, context_reuse=True) as llm:
        for one in contexts.load(1).contexts:
            llm.kv_cache_manager.pinned.add(one)
        llm.unload_adapter("all")
        llm.load_adapter("all", folders["qv"])  # other weights under the name
        assert reused(llm, None) == 0
        llm.unload_adapter("all")
        llm.load_adapter("all", folders["all"])
        assert reused(llm, "all") > 0


def test_adapters_are_loaded_and_unloaded_during_requests(engines, folders):
    with _open(engines["int8"], {"all": folders["all"]}) as llm:
        expected = _ids(llm, "all"), _ids(llm)
        with_adapter, plain = (llm.generate(PROMPT, lora=name, **GREEDY) for name in ("all", None))
        steps = iter(with_adapter), iter(plain)
        for each in steps:
            next(each)
        for name in ("qv", "mlp", "wide"):
            llm.load_adapter(name, folders[name])
        llm.unload_adapter("mlp")
        with pytest.raises(EdgeLLMError, match="'all' is in use by 1 request"):
            llm.unload_adapter("all")
        late = llm.generate(PROMPT, lora="qv", **GREEDY)
        llm.unload_adapter("qv")
        for each in steps:
            for _ in each:
                pass
        assert (with_adapter.token_ids, plain.token_ids) == expected
        with pytest.raises(EdgeLLMError, match="'qv' was unloaded"):
            next(iter(late))
        llm.unload_adapter("all")
        assert list(llm.adapters) == ["wide"]
        assert _ids(llm) == expected[1]


def test_speculation_is_lossless_with_an_adapter(eagle_pair, tmp_path):
    """The draft is the base's; drafts of several requests get hidden states of their adapters."""
    adapters = {
        name: write_adapter(tmp_path / name, eagle_pair.base_checkpoint, seed=seed, rank=4)
        for seed, name in enumerate(("one", "two"))
    }
    engine = tmp_path / "engine"
    for product, bundle, plan in (
        ("llm", eagle_pair.bundle, dataclasses.replace(BASE_PLAN, max_lora_rank=4)),
        ("draft", eagle_pair.draft_bundle, draft_plan()),
    ):
        build_engine(
            product,
            bundle,
            engine,
            dataclasses.replace(plan, max_batch_size=3),
            "onnxruntime",
            lambda _: None,
        )
    with pytest.raises(EdgeLLMError, match="--maxLoraRank is for the base"):
        read_bundle("draft", eagle_pair.draft_bundle, dataclasses.replace(PLAN, max_lora_rank=4))
    with _open(engine, adapters, spec=SpecOptions(), context_reuse=True) as llm:
        names = None, "one", "two"
        plain = [_ids(llm, name, speculative=False) for name in names]
        assert [_ids(llm, name) for name in names] == plain
        answers = [llm.generate(PROMPT, lora=name, **GREEDY) for name in names]
        for _ in llm.together(answers):
            pass
        assert [answer.token_ids for answer in answers] == plain
        assert all(answer.profile.rounds for answer in answers)


def _refuses(llm, folder, words, name="new"):
    before = dict(llm.adapters), _logits(llm, "all").tobytes()
    with pytest.raises(EdgeLLMError, match=words):
        llm.load_adapter(name, folder)
    assert before == (llm.adapters, _logits(llm, "all").tobytes())


def test_unsuitable_adapters_are_rejected(llm, tiny_checkpoint, folders, tiny_engine, tmp_path):
    def made(name, **how):
        return write_adapter(tmp_path / name, tiny_checkpoint, **how)

    _refuses(llm, tmp_path / "nowhere", "no such folder")
    _refuses(llm, made("high", rank=9), "has rank 9, the engine takes 8")
    _refuses(llm, folders["qv"], "'all' belongs to another adapter", name="all")
    _refuses(llm, folders["qv"], "needs a name", name="")
    dora = made("dora")
    edit_config(dora, use_dora=True)
    _refuses(llm, dora, "use_dora")
    other = make_checkpoint(
        tmp_path / "c", **{**models.find("llama").TINY, "intermediate_size": 64}
    )
    _refuses(llm, write_adapter(tmp_path / "other", other), "was made for another model")
    path = made("broken") / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name.replace("q_proj", "w_proj"): v for name, v in tensors.items()}, path)
    _refuses(llm, path.parent, "w_proj, which adapters of this engine cannot")
    next(iter(tensors.values()))[0, 0] = np.nan
    save_file(tensors, path)
    _refuses(llm, path.parent, "not numbers")
    path.write_bytes(path.read_bytes()[:-9])
    _refuses(llm, path.parent, "truncated")
    with pytest.raises(EdgeLLMError, match="no adapter 'unknown'") as caught:
        llm.generate(PROMPT, lora="unknown")
    assert caught.value.hint == "loaded: all, mlp, qv, wide"
    with pytest.raises(EdgeLLMError, match="no adapter 'unknown'"):
        llm.unload_adapter("unknown")
    llm.load_adapter("all", folders["all"])  # the same again
    with LLM(tiny_engine) as plain:
        with pytest.raises(EdgeLLMError, match="takes no adapters") as caught:
            plain.load_adapter("all", folders["all"])
        assert "--maxLoraRank" in caught.value.hint


def test_logprobs_with_an_adapter(llm, tiny_checkpoint, folders):
    model = reference(tiny_checkpoint, folders["wide"], {"": SCALES["wide"]})
    rows = logits_of(model, TOKENS)[:-1].astype(np.float64)
    expected = rows[np.arange(11), TOKENS[1:]] - np.log(np.exp(rows).sum(-1))
    found = [one.logprob for one in llm.read_logprobs(TOKENS.tolist(), lora="wide")]
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_half_precision_adapters(llm, tiny_checkpoint, tmp_path):
    """Adapters in the dtypes of training."""
    import ml_dtypes

    for kind in (np.float16, ml_dtypes.bfloat16):
        folder = write_adapter(tmp_path / kind.__name__, tiny_checkpoint, targets=ATTENTION)
        path = folder / "adapter_model.safetensors"
        save_file({name: value.astype(kind) for name, value in load_file(path).items()}, path)
        llm.load_adapter(kind.__name__, folder)
        expected = logits_of(reference(tiny_checkpoint, folder, {"": 2.0}), TOKENS)
        np.testing.assert_allclose(_logits(llm, kind.__name__), expected, atol=2e-4)


def test_the_layers_of_an_engine_are_checked(engines, tmp_path):
    import shutil

    engine = shutil.copytree(engines["none"], tmp_path / "engine")
    path = engine / "adapted_layers.json"
    assert json.loads(path.read_text())[0] == ["model.layers.0.self_attn.q_proj", 96, 96]
    path.write_text("[1]")
    with pytest.raises(EdgeLLMError, match=r"adapted_layers\.json"):
        LLM(engine)
