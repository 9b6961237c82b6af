"""`edgellm-quantize llm` for every family: one-layer models equal the whole model."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantize_cases import make_job, make_model, plain_sessions, write_text
from transformers import AutoModelForCausalLM

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.core.errors import EdgeLLMError, UnsupportedModelError
from edgellm.core.manifest import LLM_BUNDLE, LLM_ENGINE, load_bundle, load_engine
from edgellm.device_runtime.networks.decoder import open_decoder
from edgellm.export import models
from edgellm.export.checkpoints.checkpoint import Checkpoint
from edgellm.export.checkpoints.vlm import own_name
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.verify import run_portable
from edgellm.quantize.evaluation.layer_errors import relative
from edgellm.quantize.formats.activation_rounding import round_input
from edgellm.quantize.formats.quantized_linear import DecodedLinear, decode_linear
from edgellm.quantize.formats.schemes import SCHEMES
from edgellm.quantize.formats.tensors import Tensor, read_below
from edgellm.quantize.job import Job
from edgellm.quantize.metrics import questions
from edgellm.quantize.metrics.divergence import Quality
from edgellm.quantize.models.families import FAMILIES, Family
from edgellm.quantize.pipeline.planning import make_plan
from edgellm.quantize.pipeline.run import run_job

pytestmark = pytest.mark.usefixtures("one_thread")

# Relative errors of a weight rounded to nearest, in blocks of 32
WORST = {"fp8": 0.03, "int8_sq": 0.02, "int4_awq": 0.14, "nvfp4": 0.11}
# Relative to the logits; near-ties of quantized inputs may round differently.
FAR = {"int4_awq": 2e-5, "fp8": 0.06, "int8_sq": 0.06}
# Families with equal structure.
OTHERS_SHOW = (
    "gemma4_unified_text",
    "lfm2",
    "mistral",
    "olmoe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "seed_oss",
)
# INT4 folds smoothing, so every family runs it; other schemes run where layers differ.
CASES = [(kind, "int4_awq") for kind in FAMILIES if kind not in OTHERS_SHOW] + [
    (kind, scheme)
    for kind, scheme in product(("cohere2", "gemma2", "olmo2", "phi3", "starcoder2"), WORST)
    if scheme != "int4_awq"
]
CASES += [("gemma4_text", "int8_sq"), ("gemma4_experts", "int4_awq")]
# AWQ's scales raise the errors of this model's weights above that of rounding to nearest
CASES += [("gemma4_unified_text", "int8_sq")]
CASES += [("qwen3_moe", "nvfp4"), ("mixtral", "int8_sq"), ("qwen2_moe", "fp8")]
ANSWERS = ("lfm2", "phi3")  # layers that need the whole sequence, and layers with a KV cache
PROMPTS, TOKENS, END = ((9, 10, 50, 11), (31, 12, 80), (40, 41, 42, 43, 9)), 6, 2
ENGINES = ("cohere2", "gemma3_text", "phi3", "granitemoe")
# Architectures, and changes of their tiny configs.
VARIANTS = {
    "gemma4_experts": (
        "gemma4_text",
        {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 96,
        },
    )
}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.jsonl")


def test_every_architecture_is_a_family():
    """Except gpt-oss, which is published with 4-bit experts."""
    assert {*FAMILIES} == {*models.supported()} - {"gpt_oss"}


@pytest.mark.each_change(
    "llama-int4_awq", "gemma4_text-int8_sq", "qwen3_5_text-int4_awq", "qwen3_moe-nvfp4"
)
@pytest.mark.parametrize(("kind", "scheme"), CASES)
def test_the_bundle_agrees_with_the_report(tmp_path, text, monkeypatch, kind, scheme):
    """Report, transformers with dequantized weights, and the bundle's graph agree."""
    architecture, changes = VARIANTS.get(kind, (kind, {}))
    model = make_model(tmp_path / "model", architecture, **changes)
    asks = {"answers": str(_questions(tmp_path, monkeypatch))} if kind in ANSWERS else {}
    job = make_job(model, text, tmp_path / "quantized", scheme, num_samples=4, **asks)
    quality, rows, whole = *_run(job), _transformers(model)
    assert quality.perplexity_float == pytest.approx(_perplexity(whole, rows), rel=1e-5)
    answers = [_answer(whole, list(question)) for question in PROMPTS] if asks else []

    checkpoint = open_checkpoint(str(job.output_dir))
    _quantize(whole, checkpoint, SCHEMES[scheme].rounds_input)
    assert quality.perplexity_quantized == pytest.approx(_perplexity(whole, rows), rel=1e-2)
    if asks:
        others = [_answer(whole, list(question)) for question in PROMPTS]
        changed = sum(one != other for one, other in zip(answers, others, strict=True))
        found = quality.answers
        assert (found.changed, found.answers) == (changed, len(PROMPTS))
        assert found.tokens == np.mean([len(answer) for answer in answers])
    if scheme == "nvfp4":  # unsupported by ONNX Runtime on CPUs
        return
    bundle = tmp_path / "bundle"
    export_llm(checkpoint, bundle, ExportOptions(dtype="fp32"))
    with monkeypatch.context() as context:
        plain_sessions(context)
        found = run_portable(bundle, load_bundle(bundle, LLM_BUNDLE), rows[0], len(rows[0]) - 2)
    expected = whole(torch.from_numpy(rows[:1])).logits[0].numpy()
    assert relative(expected, found) < FAR[scheme]
    if kind in ENGINES and scheme == "int4_awq":
        plan = Plan(max_input_len=48, kv_capacity=64, threads=1, prefill="auto")
        build_engine("llm", bundle, tmp_path / "engine", plan, "onnxruntime", lambda _: None)
        session = open_decoder(tmp_path / "engine", load_engine(tmp_path / "engine", LLM_ENGINE))
        logits = session.run(rows[0], 0, np.arange(len(rows[0]))).logits
        # Its KV cache and inputs are quantized, so some tokens may take other experts.
        errors = [relative(*each) for each in zip(expected, logits, strict=True)]
        assert np.median(errors) < 0.15


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_cache_quantization": "int8"}, "layers of this model share keys and values"),
        ({"rotate": "values"}, "a norm or a convolution follows the model's v_proj"),
    ],
)
def test_gemma_4_refuses_what_its_layers_do_not_support(tmp_path, text, changes, words):
    model = make_model(tmp_path / "model", "gemma4_text")
    job = make_job(model, text, tmp_path / "quantized", "int8_sq", **changes)
    with pytest.raises(EdgeLLMError, match=words):
        _run(job)
    assert not job.output_dir.exists()


@pytest.mark.each_change("gemma2", "granite")
@pytest.mark.parametrize(
    "kind",
    [
        "gemma2",
        "granite",
        "cohere2",
        "starcoder2",
        pytest.param("muse_glimmer_text", marks=pytest.mark.nightly),
    ],
)
def test_logits_have_the_familys_scaling_and_soft_cap(tmp_path, text, kind):
    """Also a final norm with a bias."""
    model = make_model(tmp_path / "model", kind)
    job = make_job(model, text, tmp_path / "out", "fp8", lm_head_quantization="int8")
    quality, rows, whole = *_run(job), _transformers(model)
    checkpoint = open_checkpoint(str(job.output_dir))
    _quantize(whole, checkpoint, True)
    head = decode_linear(read_below(checkpoint.tensors, ""), "lm_head", (96, 96), False)
    whole.lm_head.weight = torch.nn.Parameter(torch.from_numpy(head.weight), requires_grad=False)
    assert quality.perplexity_quantized == pytest.approx(_perplexity(whole, rows), rel=1e-2)


@pytest.mark.each_change("gemma2")
@pytest.mark.parametrize("kind", ["gemma2", "phi3"])
def test_fp8_and_int8_kv_cache_scales_agree_with_any_attention(tmp_path, text, kind):
    """ModelOpt's and edgellm's calibration over the same text agree."""
    model, ranges = make_model(tmp_path / "model", kind), {}
    for cache in ("fp8", "int8"):
        job = make_job(model, text, tmp_path / cache, "fp8", kv_cache_quantization=cache)
        run_job(job, lambda *_: None)
        bundle = tmp_path / f"{cache}-bundle"
        export_llm(open_checkpoint(str(job.output_dir)), bundle, ExportOptions(dtype="fp32"))
        ranges[cache] = load_bundle(bundle, LLM_BUNDLE).decoder.kv.ranges
    assert ranges["fp8"].keys == pytest.approx(ranges["int8"].keys, rel=1e-3)
    assert ranges["fp8"].values == pytest.approx(ranges["int8"].values, rel=1e-3)


def test_an_unknown_family_is_rejected(tmp_path, text, monkeypatch):
    job = make_job(make_model(tmp_path / "model", "phi3"), text, tmp_path / "result", "fp8")
    monkeypatch.delitem(FAMILIES, "phi3")
    with pytest.raises(UnsupportedModelError, match="calibration of 'phi3' is unsupported") as e:
        run_job(job, lambda *_: None)
    assert "llm_build --quantize int8" in e.value.hint
    assert not (tmp_path / "result").exists()


def test_embedding_models_are_rejected(tmp_path, text):
    """The result would be exported as a language model: nothing would say how it pools."""
    model = make_model(tmp_path / "model", "qwen3")
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    package = "sentence_transformers.models"
    modules = [{"type": f"{package}.{name}", "path": path} for name, path in kinds]
    (model / "modules.json").write_text(json.dumps(modules))
    (model / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 96, "pooling_mode_lasttoken": True}
    (model / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with pytest.raises(UnsupportedModelError, match="is an embedding model") as error:
        run_job(make_job(model, text, tmp_path / "result", "fp8"), lambda *_: None)
    assert "llm_build --quantize int8" in error.value.hint
    assert not (tmp_path / "result").exists()


def _run(job: Job) -> tuple[Quality, np.ndarray]:
    """Return a run's quality and its held-out text."""
    report = run_job(job, lambda *_: None)
    errors = [error for layer in report.layers for error in layer.weight_errors.values()]
    assert max(errors) < WORST[job.quantization]
    return report.quality, make_plan(job).task.calibration.held_out


def _questions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a file of `PROMPTS`; limit outputs to `TOKENS`."""
    monkeypatch.setattr(questions, "_MAX_TOKENS", TOKENS)
    lines = [{"text": " ".join(f"w{token}" for token in prompt)} for prompt in PROMPTS]
    path = folder / "questions.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def _answer(model: Any, ids: list[int]) -> list[int]:
    found: list[int] = []
    while len(found) < TOKENS and (not found or found[-1] != END):
        found.append(int(model(torch.tensor([[*ids, *found]])).logits[0, -1].argmax()))
    return found


def _transformers(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return model.requires_grad_(False)


def _perplexity(model: Any, rows: np.ndarray) -> float:
    ids = torch.from_numpy(rows)
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    return float(torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).exp())


def _quantize(model: Any, checkpoint: Checkpoint, rounds_input: bool) -> None:
    """Load dequantized weights into a model, and quantize the inputs of its layers."""
    tensors, family = _tensors(checkpoint), FAMILIES[checkpoint.config["model_type"]]
    for name, module in model.model.named_modules():
        place = f"model.{_stored(name, family)}"
        if hasattr(module, "down_proj") and name.endswith(".experts"):
            _quantize_experts(module, name, checkpoint, rounds_input)
        elif isinstance(module, torch.nn.Linear) and f"{place}.weight_scale" in tensors:
            shape = module.out_features, module.in_features
            linear = decode_linear(tensors, place, shape, rounds_input)
            module.weight.copy_(torch.from_numpy(linear.weight))
            if module.bias is not None:
                module.bias.copy_(torch.from_numpy(tensors[f"{place}.bias"].floats()))
            module.register_forward_pre_hook(lambda _, x, linear=linear: (_rounded(linear, x[0]),))
        elif "norm" in name:
            for part, values in module.named_parameters(recurse=False):
                values.copy_(torch.from_numpy(tensors[f"{place}.{part}"].floats()))


def _stored(name: str, family: Family) -> str:
    """Return the checkpoint's name of a module."""
    layers, *rest = name.split(".", 2)
    if layers != "layers" or len(rest) < 2:
        return name
    return f"layers.{rest[0]}.{family.stored_name(f'{rest[1]}.')}".removesuffix(".")


def _quantize_experts(module: Any, name: str, checkpoint: Checkpoint, has_inputs: bool) -> None:
    """Load dequantized experts; their inputs stay float."""
    tensors, family = _tensors(checkpoint), FAMILIES[checkpoint.config["model_type"]]
    layer, local = (part for part in name.split(".", 2)[1:])
    for index, down in enumerate(module.down_proj):
        is_gated = hasattr(module, "gate_up_proj")
        first = module.gate_up_proj[index].chunk(2) if is_gated else [module.up_proj[index]]
        names = ("gate_proj", "up_proj", "down_proj")[-len(first) - 1 :]
        for part, weight in zip(names, (*first, down), strict=True):
            stored = family.stored_name(f"{local}.{index}.{part}.weight").removesuffix(".weight")
            place = f"model.layers.{layer}.{stored}"
            linear = decode_linear(tensors, place, tuple(weight.shape), has_inputs)
            weight.copy_(torch.from_numpy(linear.weight))


def _tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {own_name(name): each for name, each in read_below(checkpoint.tensors, "").items()}


def _rounded(linear: DecodedLinear, x: torch.Tensor) -> torch.Tensor:
    smooth = linear.pre_quant_scale
    x = x if smooth is None else x * torch.from_numpy(smooth.copy())
    return round_input(x, linear.input_type, linear.input_scale)
