"""Mixtures of experts: stored MXFP4, and checkpoints that contradict their config."""

from __future__ import annotations

import json
import re
import shutil

import ml_dtypes
import numpy as np
import pytest
from conftest import assert_one_line_error, make_checkpoint
from portable import open_portable
from quantized_layouts import LAYOUTS, write_checkpoint
from safetensors.numpy import load_file, save_file

from edgellm.build.engine import build_engine
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.core.errors import (
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.device_runtime.networks.decoder import open_decoder
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.verify import run_portable, verify_bundle

TOLERANCE = 2e-4
IDS = np.random.default_rng(1).integers(9, 96, 30)
GPT_OSS = {**models.find("gpt_oss").TINY, "intermediate_size": 64}


def mxfp4(weight):
    """Blocks and scales of floats [E, out, in], and their dequantized values."""
    folded = np.ascontiguousarray(weight).reshape(*weight.shape[:2], -1, 32)
    exponents = np.ceil(np.log2(np.abs(folded).max(-1) / 6)) + 127
    exponents[0, 0, 0] = 0  # 2 ** -127, where bfloat16 has no normal number
    steps = np.exp2(exponents - 127)[..., None].astype(np.float64)
    codes = np.clip(folded / steps, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    nibbles = codes.view(np.uint8)
    blocks = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    values = (codes.astype(np.float64) * steps).reshape(weight.shape)
    return blocks, exponents.astype(np.uint8), values.astype(np.float32)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """A checkpoint in MXFP4, and one of its dequantized floats."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    dense = make_checkpoint(folder / "dense", **GPT_OSS)
    tensors = load_file(dense / "model.safetensors")
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales, values = mxfp4(stored.pop(name).transpose(0, 2, 1))
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        tensors[name] = np.ascontiguousarray(values.transpose(0, 2, 1))
    shutil.copytree(dense, folder / "mxfp4")
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    write(folder / "mxfp4", stored, quantization_config={"quant_method": "mxfp4"})
    return folder / "mxfp4", dense


def write(folder, tensors, **config):
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


def export(checkpoint, folder):
    export_llm(open_checkpoint(str(checkpoint)), folder, ExportOptions(dtype="fp32"))
    return folder


def logits(session):
    pieces = [session.run(IDS[:20], 0, np.arange(20)).logits.copy()]
    pieces += [session.run(IDS[[at]], at, np.array([0])).logits.copy() for at in range(20, 30)]
    return np.concatenate(pieces)


def test_mxfp4_equals_the_dequantized_weights(gpt_oss, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    bundle = export(gpt_oss[0], tmp_path / "bundle")
    graph = (bundle / "model.onnx").read_bytes()
    assert b"Fp4Experts" in graph
    model = AutoModelForCausalLM.from_pretrained(gpt_oss[1], attn_implementation="eager")
    with torch.no_grad():
        expected = model(torch.from_numpy(IDS)[None]).logits[0].numpy()
    np.testing.assert_allclose(logits(open_portable(bundle, 64)), expected, atol=TOLERANCE)
    # The build compares the engine with the portable graph, to within the rounding of inputs.
    for quantize, precision in (("none", "fp4"), ("int8", "fp4+int8")):
        plan = Plan(
            max_input_len=48,
            kv_capacity=64,
            threads=1,
            quantize=quantize,
            options=CpuOptions("edgellm"),
        )
        engine = tmp_path / quantize
        manifest = build_engine("llm", bundle, engine, plan, "onnxruntime", lambda _: None)
        assert manifest.main_graphs[0].precision == precision
        found = logits(open_decoder(engine, manifest))
        assert np.sqrt(np.mean((found - expected) ** 2)) < 0.1 * expected.std()


def test_verify_decodes_mxfp4(gpt_oss, tmp_path):
    bundle = export(gpt_oss[0], tmp_path / "bundle")
    manifest = load_bundle(bundle, LLM_BUNDLE)
    verdict = verify_bundle(open_checkpoint(str(gpt_oss[0])), bundle, manifest)
    assert float(re.search(r"logit difference ([^,]+),", verdict)[1]) < TOLERANCE


def changed(source, folder, change, **config):
    """A copy whose tensors `change` alters."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    write(folder, tensors, **config)
    return folder


def _scale(exponent):
    def change(tensors):
        tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 5, 1] = exponent

    return change


def _cut_blocks(tensors):
    name = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    tensors[name] = np.ascontiguousarray(tensors[name][:, :, :2])


@pytest.mark.parametrize(
    ("change", "dtype", "words"),
    [
        (_scale(253), "fp32", ("1.mlp.experts.down_proj_scales holds values that are not",)),
        (_scale(141), "fp16", ("down_proj_scales scales weights beyond", "--dtype fp32")),
        (_cut_blocks, "fp32", ("gate_up_proj_blocks has shape [5, 128, 2, 16]", "[5, 128, 3, 16]")),
    ],
    ids=["infinite", "half", "shape"],
)
def test_damaged_mxfp4_is_rejected(change, dtype, words, gpt_oss, command_here, tmp_path):
    checkpoint = changed(gpt_oss[0], tmp_path / "checkpoint", change)
    result = command_here("edgellm-export", "llm", "--model_dir", checkpoint, "--output_dir",
                     tmp_path / "new" / "bundle", "--dtype", dtype)  # fmt: skip
    assert_one_line_error(result, *words)
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    tiny = models.find("qwen3_moe").TINY
    return make_checkpoint(tmp_path_factory.mktemp("qwen") / "checkpoint", **tiny)


_MLP = "model.layers.0.mlp."


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("inner", [64, 96])  # in the second, gates and ups are square
def test_joined_experts_are_read_in_both_orders(inner, is_turned, tmp_path):
    """[E, 2 I, H] of Qwen3.5's published files, [E, H, 2 I] of Qwen3-VL's."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 192, "moe_intermediate_size": inner}
    source = make_checkpoint(tmp_path / "ck", **{**models.find("qwen3_moe").TINY, **sizes})
    expected = logits(open_portable(export(source, tmp_path / "separate"), 64))
    tensors = load_file(source / "model.safetensors")
    experts = [name for name in tensors if ".experts." in name]
    apart = {name: tensors.pop(name) for name in experts}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        gates, ups, downs = (
            np.stack([apart[f"{prefix}{index}.{part}_proj.weight"] for index in range(6)])
            for part in ("gate", "up", "down")
        )
        joined = {"gate_up_proj": np.concatenate([gates, ups], axis=1), "down_proj": downs}
        for name, array in joined.items():
            tensors[prefix + name] = array.swapaxes(1, 2) if is_turned else array
    write(source, tensors)
    found = logits(open_portable(export(source, tmp_path / "joined"), 64))
    np.testing.assert_array_equal(found, expected)


def _without(name):
    return lambda tensors: tensors.pop(_MLP + name)


def _with(name, shape, dtype=np.float32):
    return lambda tensors: tensors.update({_MLP + name: np.zeros(shape, dtype)})


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (_without("experts.3.up_proj.weight"), {}, "no tensor .*experts.3.up_proj.weight"),
        (_with("experts.2.down_proj.weight", (96, 40)), {}, r"2.down_proj.* \[96, 40\], .*\[96, 4"),
        (_with("experts.1.gate_proj.weight", (48, 96), np.float16), {}, "1.gate_proj.* FLOAT16, "),
        (_with("gate.weight", (5, 96)), {}, r"mlp.gate.weight has shape \[5, 96\], .* \[6, 96\]"),
        (dict, {"num_local_experts": 5}, r"gate.weight has shape \[6, 96\]"),
        (_with("experts.6.up_proj.weight", (48, 96)), {}, "not use: .*experts.6.up_proj.weight"),
        (dict, {"num_experts_per_tok": 7}, "num_experts_per_tok = 7, but num_local_experts = 6"),
        (dict, {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        (dict, {"num_experts": 7}, "num_experts = 7 is not supported"),
    ],
    ids=["missing", "shape", "type", "router", "fewer", "more", "top_k", "activation", "two"],
)
def test_checkpoints_that_contradict_their_config_are_rejected(
    change, config, message, qwen, tmp_path
):
    checkpoint = changed(qwen, tmp_path / "checkpoint", change, **config)
    with pytest.raises(EdgeLLMError, match=message):
        export(checkpoint, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.each_change("awq-int4", "gptq-8-int8", "fp8-blocks-fp8", "ct-nvfp4-fp4")
@pytest.mark.parametrize(
    ("layout", "precision"),
    [("w8a16", "int8"), ("awq", "int4"), ("gptq-8", "int8"), ("ct-int4", "int4"),
     ("ct-fp8", "fp8"), ("fp8-blocks", "fp8"), ("ct-nvfp4", "fp4")],
)  # fmt: skip
def test_quantized_experts_equal_the_dequantized_weights(layout, precision, qwen, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    meant = write_checkpoint(qwen, tmp_path / "checkpoint", LAYOUTS[layout])
    bundle = export(tmp_path / "checkpoint", tmp_path / "bundle")
    changed(qwen, tmp_path / "meant", lambda tensors: tensors.update(meant))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "meant", attn_implementation="eager")
    with torch.no_grad():
        expected = model(torch.from_numpy(IDS)[None]).logits[0].numpy()
    if precision != "fp4":  # of linear layers, which ONNX Runtime does not have on CPUs
        # As it is: ONNX Runtime would round the inputs of integers.
        portable = open_portable(bundle, 64, bundle / "model.onnx")
        np.testing.assert_allclose(logits(portable), expected, atol=TOLERANCE)
    plan = Plan(max_input_len=48, kv_capacity=64, threads=1, options=CpuOptions("edgellm"))
    manifest = build_engine("llm", bundle, tmp_path / "e", plan, "onnxruntime", lambda _: None)
    assert manifest.main_graphs[0].precision == precision
    said = "not compared" if precision == "fp4" else "tokens, relative error"
    assert said in manifest.options["checks"][0]
    error = logits(open_decoder(tmp_path / "e", manifest)) - expected
    errors = np.linalg.norm(error, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.median(errors) < 0.05  # rounded inputs may send some rows to other experts


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("int4", "experts.0.gate_proj has smoothed inputs, which experts of a mixture"),
        ("int8_sq", "experts.0.gate_proj has "),
        ("gptq-order", "experts.0.gate_proj has inputs in another order"),
    ],
)
def test_experts_with_different_quantization_are_rejected(layout, message, qwen, tmp_path):
    write_checkpoint(qwen, tmp_path / "checkpoint", LAYOUTS[layout])
    with pytest.raises(UnsupportedModelError, match=message):
        export(tmp_path / "checkpoint", tmp_path / "bundle")


def test_biases_of_experts_keep_float32(tmp_path):
    """A bundle in fp16 has them as stored; the next number after 2000 is 2001 there."""
    import torch
    from transformers import AutoModelForCausalLM

    checkpoint = make_checkpoint(tmp_path / "c", **models.find("kimi_linear").TINY)
    tensors = load_file(checkpoint / "model.safetensors")
    for name, bias in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = 2000 + 0.15 * np.arange(len(bias), dtype=np.float32)
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.from_numpy(IDS)[None]).logits[0].numpy()
    bundle = tmp_path / "bundle"
    manifest = export_llm(open_checkpoint(str(checkpoint)), bundle, ExportOptions(dtype="fp16"))
    found = run_portable(bundle, manifest, IDS, 20)
    far = np.abs(found - expected).max(-1) / np.abs(expected).max()
    assert np.quantile(far, 0.8) < 0.02  # a near tie of shares may fall the other way
