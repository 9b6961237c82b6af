"""`--format compressed-tensors`: quantized values of ModelOpt's format, and the model's output."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from quantize_cases import make_job, make_model, plain_sessions, write_text
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.verify import run_portable
from edgellm.quantize.formats.schemes import SCHEMES, check_format
from edgellm.quantize.pipeline.run import run_job

pytestmark = pytest.mark.usefixtures("one_thread")

FORMAT = "compressed-tensors"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# Grouped queries, norms with an offset, fused and ungated MLPs, biases of values, post-norms
CASES = [
    ("llama", "int4_awq"), ("llama", "int8_sq"), ("llama", "fp8"), ("llama", "nvfp4"),
    ("qwen2", "int8_sq"), ("gemma2", "int8_sq"), ("phi3", "int4_awq"),
    ("arcee", "int8_sq"), ("olmo2", "int4_awq"), ("olmo2", "int8_sq"),
    ("granitemoehybrid", "int8_sq"),
]  # fmt: skip

# Without experts: quantized inputs may change the routing.
DENSE = {
    "granitemoehybrid": {
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "layer_types": ["attention", "mamba", "attention"],
    }
}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.jsonl")


def read(folder: Path) -> dict[str, np.ndarray]:
    """Load tensors in numpy's types, float8 in ml_dtypes'."""
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.dtype == torch.float8_e4m3fn:
            found[name] = tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
        else:
            found[name] = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return found


def codes(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Return a layer's quantized values in either format, [out, in]; FP4 and FP8 as bytes."""
    packed = tensors.get(f"{name}.weight_packed")
    weight = tensors.get(f"{name}.weight")
    if packed is not None and packed.dtype == np.int32:  # eight in a word, the first lowest
        words = packed.view(np.uint32)
        nibbles = [(words >> np.uint32(4 * place)) & 15 for place in range(8)]
        return np.stack(nibbles, -1).reshape(len(words), -1).astype(np.int8) - np.int8(8)
    stored = weight if packed is None else packed
    is_int4 = stored.dtype == np.uint8 and tensors[f"{name}.weight_scale"].dtype == np.float32
    if not is_int4:
        return stored.view(np.uint8) if stored.dtype != np.int8 else stored
    low, high = (stored & 15).astype(np.int8), (stored >> 4).astype(np.int8)  # two a byte
    both = np.stack([low, high], 1).reshape(-1, stored.shape[1])
    return np.where(both > 7, both - 16, both).astype(np.int8)


def value(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Dequantize a weight [out, in] of the compressed-tensors format."""
    found, scale = codes(tensors, name), tensors[f"{name}.weight_scale"].astype(np.float32)
    if f"{name}.weight_global_scale" in tensors:
        pairs = np.stack([found & 15, found >> 4], -1).reshape(len(found), -1)
        return E2M1[pairs] * np.repeat(scale / tensors[f"{name}.weight_global_scale"], 16, 1)
    if found.dtype == np.uint8:
        found = found.view(ml_dtypes.float8_e4m3fn)
    numbers = found.astype(np.float32)
    return numbers * np.repeat(
        scale.reshape(-1, scale.shape[-1]), found.shape[1] // scale.shape[-1], 1
    )


def layers(tensors: dict[str, np.ndarray]) -> list[str]:
    return [name.removesuffix(".weight_scale") for name in tensors if name.endswith("weight_scale")]


@pytest.mark.each_change("llama-int4_awq", "llama-nvfp4")
@pytest.mark.parametrize(("kind", "scheme"), CASES)
def test_both_formats_have_equal_values(tmp_path, text, monkeypatch, kind, scheme):
    model = make_model(tmp_path / "model", kind, **DENSE.get(kind, {}))
    jobs = [
        make_job(model, text, tmp_path / name, scheme, num_samples=4, format=name)
        for name in ("modelopt", FORMAT)
    ]
    reports = [run_job(job, lambda *_: None) for job in jobs]
    theirs, ours = (read(job.output_dir) for job in jobs)
    assert sorted(layers(theirs)) == sorted(layers(ours))
    assert not any(name.endswith("pre_quant_scale") for name in ours)
    changed = {
        name.split(".", 3)[3]
        for name in layers(ours)
        if not np.array_equal(codes(theirs, name), codes(ours, name))
    }
    # Factors of shared value heads change; in other families they cannot be folded.
    assert changed <= {
        "llama": {"self_attn.o_proj"}, "arcee": {"self_attn.o_proj", "mlp.down_proj"},
        "olmo2": {"self_attn.o_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                  "mlp.gate_proj", "mlp.up_proj"},
        "granitemoehybrid": {"self_attn.o_proj", "mamba.in_proj", "mamba.out_proj"},
    }.get(kind, {"self_attn.o_proj"})  # fmt: skip
    kl = [report.quality.kl_divergence for report in reports]
    assert kl[1] < 1.5 * kl[0] + 0.002
    sizes = [report.bits_per_weight for report in reports]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.15)
    if scheme != "nvfp4":  # unsupported by ONNX Runtime on CPUs
        _expect_logits(jobs[1].output_dir, model, ours, tmp_path / "bundle", monkeypatch, scheme)


def _expect_logits(folder, model, tensors, bundle, monkeypatch, scheme) -> None:
    """Compare the bundle with transformers' model of dequantized weights."""
    checkpoint = open_checkpoint(str(folder))
    manifest = export_llm(checkpoint, bundle, ExportOptions(dtype="fp32"))
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    floats = {name for name in whole.state_dict() if f"{name}_scale" not in tensors}
    state = {name: torch.from_numpy(tensors[name]) for name in floats & set(tensors)}
    state |= {f"{name}.weight": torch.from_numpy(value(tensors, name)) for name in layers(tensors)}
    whole.load_state_dict(state, strict=False)
    if scheme == "fp8":
        for name, module in whole.named_modules():
            if name in layers(tensors):
                module.register_forward_pre_hook(_rounding(tensors[f"{name}.input_scale"]))
    ids = np.arange(9, 29)
    plain_sessions(monkeypatch)
    found = run_portable(bundle, load_bundle(bundle, LLM_BUNDLE), ids, len(ids) - 2)
    expected = whole(torch.from_numpy(ids[None])).logits[0].detach().numpy()
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < (0.06 if scheme == "fp8" else 2e-5)
    float_model = AutoModelForCausalLM.from_pretrained(model)
    wanted = sum(parameter.numel() for parameter in float_model.parameters())
    assert manifest.decoder.num_parameters == wanted


def _rounding(scale: np.ndarray):
    def before(_: object, args: tuple) -> tuple:
        limited = np.clip(args[0].detach().numpy() / scale, -448, 448)
        return (
            torch.from_numpy(limited.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale),
        )

    return before


def test_the_config_describes_the_scheme(tmp_path, text):
    model = make_model(tmp_path / "model", "llama")
    job = make_job(model, text, tmp_path / "out", "fp8", num_samples=2, format=FORMAT,
                   keep_layers=(), kv_cache_quantization="fp8")  # fmt: skip
    run_job(job, lambda *_: None)
    assert not (job.output_dir / "hf_quant_config.json").exists()
    said = json.loads((job.output_dir / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == FORMAT
    assert said["format"] == "float-quantized"
    assert said["ignore"] == ["lm_head", "model.embed_tokens"]
    assert said["kv_cache_scheme"]["type"] == "float"
    assert read(job.output_dir)["model.layers.1.self_attn.k_scale"].shape == (1,)
    bundle = export_llm(
        open_checkpoint(str(job.output_dir)), tmp_path / "bundle", ExportOptions(dtype="fp32")
    )
    assert bundle.spec.kv.ranges is not None


def test_the_config_lists_float_layers(tmp_path, text):
    model = make_model(tmp_path / "model", "llama")
    job = make_job(
        model, text, tmp_path / "out", "int4_awq", num_samples=2, format=FORMAT, keep_layers=(1,)
    )
    run_job(job, lambda *_: None)
    said = json.loads((job.output_dir / "config.json").read_text())["quantization_config"]
    assert "model.layers.1.mlp.down_proj" in said["ignore"]
    tensors = read(job.output_dir)
    assert "model.layers.1.mlp.down_proj.weight" in tensors
    assert "model.layers.0.mlp.down_proj.weight" not in tensors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gguf", "fp8", None, None), "--format gguf: no such choice"),
        ((FORMAT, "nvfp4_awq", None, None), "cannot store the smoothing"),
        ((FORMAT, "fp8", "fp8", None), "requires a float head"),
        ((FORMAT, "fp8", None, "int8"), "does not support an int8 KV cache"),
    ],
)
def test_unsupported_schemes_are_rejected(arguments, message):
    name, scheme, head, cache = arguments
    with pytest.raises(EdgeLLMError, match=message):
        check_format(name, SCHEMES[scheme], head, cache)
