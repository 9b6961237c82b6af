"""GGUF files of all families with stored blocks: logits equal those of dequantized floats."""

from __future__ import annotations

import dataclasses
import zlib

import gguf
import numpy as np
import pytest
from conftest import make_checkpoint
from gguf_files import CASES, write_gguf
from gguf_hybrids import HYBRIDS, write_hybrid
from gguf_text import TEXTS
from mixed_gguf import scaled_blocks, type_of
from portable import open_portable
from transformers import AutoModelForCausalLM

from edgellm.build.engine import build_engine
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.device_runtime.networks.decoder import open_decoder
from edgellm.export.checkpoints.quantized.gguf import FORMS
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = np.random.default_rng(5).integers(9, 96, 40)
# Types of tensors: of what llama.cpp mixes, in blocks of 32.
KINDS = {
    "attn_q": "Q4_0", "attn_k": "Q8_0", "attn_v": "Q5_1", "attn_qkv": "Q4_1", "attn_output": "Q4_1",
    "ffn_gate": "Q5_0", "ffn_up": "Q4_1", "ffn_down": "IQ4_NL", "token_embd": "Q8_0",
    "output": "Q4_1", "ffn_gate_exps": "Q4_1", "ffn_up_exps": "Q4_1", "ffn_down_exps": "Q5_0",
}  # fmt: skip
KINDS |= dict.fromkeys(("ssm_in", "ssm_ba", "ssm_alpha", "attn_gate", "in_proj"), "Q4_0")
KINDS |= dict.fromkeys(("ssm_out", "ssm_beta", "out_proj", "ffn_latent_up"), "Q8_0")
KINDS |= dict.fromkeys(("ffn_latent_down", "ffn_up_shexp", "ffn_down_shexp"), "Q5_1")
KINDS |= {"ffn_gate_shexp": "Q4_1", "attn_q_a": "Q4_0", "attn_q_b": "Q8_0"}
KINDS |= {"attn_kv_a_mqa": "Q5_1", "attn_kv_b": "Q4_1", "attn_k_b": "Q8_0", "attn_v_b": "Q4_0"}
KINDS |= {"ssm_f_a": "Q8_0", "ssm_f_b": "Q4_0", "ssm_g_a": "Q5_0", "ssm_g_b": "Q4_1"}
# As Q4_K_M has them.
K_KINDS = dict.fromkeys(KINDS, "Q4_K") | {"attn_v": "Q6_K", "ffn_down_exps": "Q6_K"}
MXFP4 = {**KINDS, **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), "MXFP4")}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64}  # fmt: skip
EVEN = {
    "linear_value_head_dim": 32,
    "linear_head_dim": 32,
    "qk_nope_head_dim": 32,
    "intermediate_size": 96,
    "shared_intermediate_size": 96,
    "moe_intermediate_size": 64,
}
TERNARY = {
    **dict.fromkeys(("attn_q", "ffn_down"), "TQ1_0"),
    **dict.fromkeys(("attn_k", "ffn_gate"), "TQ2_0"),
    **dict.fromkeys(("attn_v", "output"), "Q1_0"),
    **dict.fromkeys(("attn_output", "ffn_up", "token_embd"), "Q2_0"),
}
OTHERS = {**HYBRIDS, **TEXTS}
FILES = {
    **{name: (name, {}, KINDS) for name in
       ("gemma2", "gemma3", "granite", "olmo2", "olmo3", "phi3", "smollm3")},
    "qwen3moe": ("qwen3moe", WIDE, K_KINDS),
    "ternary": ("qwen3", WIDE, TERNARY),
    "gpt-oss": ("gpt-oss", {}, MXFP4),
    "qwen3next": ("qwen3next", EVEN, KINDS),
    "qwen35": ("qwen35", {**WIDE, "linear_num_value_heads": 4, "linear_value_head_dim": 64},
               {**K_KINDS, "ssm_out": "Q5_K"}),
    "granitehybrid": ("granitehybrid", EVEN, KINDS),
    "falcon-h1": ("falcon-h1", EVEN, KINDS),
    "nemotron_h_moe": ("nemotron_h_moe", EVEN, KINDS),
    "lfm2moe": ("lfm2moe", EVEN, KINDS),
    "glm4": ("glm4", EVEN, KINDS),
    "starcoder2": ("starcoder2", EVEN, KINDS),
    "minicpm3": ("minicpm3", EVEN, KINDS),
    "qwen2moe": ("qwen2moe", EVEN, KINDS),
    "olmoe": ("olmoe", EVEN, KINDS),
    "granitemoe": ("granitemoe_shared", EVEN, KINDS),
    "ernie4_5-moe": ("ernie4_5-moe", {**EVEN, "intermediate_size": 256}, KINDS),
    "mixtral": ("mixtral", EVEN, KINDS),
    "kimi-linear": ("kimi-linear", EVEN, KINDS),
}  # fmt: skip


def encode(kinds, name, array):
    """Any codes, as large as weights are; those of MXFP4 by the package."""
    kind = kinds[name.split(".")[-2]]
    number = type_of(kind)
    if kind == "MXFP4":
        return gguf.quantize(np.ascontiguousarray(array), number), number
    rows = array.reshape(-1, array.shape[-1])
    blocks = scaled_blocks(kind, rows.size // FORMS[kind].values, 0.03, zlib.crc32(name.encode()))
    return blocks.reshape(*array.shape[:-1], -1), number


def write(folder, name):
    case, changes, kinds = FILES[name]
    arch, config = {**CASES, **OTHERS}[case]
    changes = {key: value for key, value in changes.items() if key in config}
    checkpoint = make_checkpoint(folder / "hf", **{**config, **changes})
    if case in OTHERS:
        write_hybrid(folder / "model.gguf", arch, checkpoint, lambda *each: encode(kinds, *each))
        return folder / "model.gguf"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    write_gguf(folder / "model.gguf", arch, model, lambda *each: encode(kinds, *each))
    return folder / "model.gguf"


def logits(session):
    return session.run(IDS, 0, np.arange(len(IDS))).logits.copy()


def distances(found, expected):
    return np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)


@pytest.mark.each_change(
    "gemma3", "ternary", "qwen35", "granitehybrid", "nemotron_h_moe", "kimi-linear", "qwen2moe"
)
@pytest.mark.parametrize("name", FILES)
def test_stored_blocks_equal_the_decoded_floats(name, tmp_path):
    checkpoint = open_checkpoint(str(write(tmp_path, name)))
    kept = dataclasses.replace(checkpoint, tensors=checkpoint.blocks)
    for folder, source in (("kept", kept), ("floats", checkpoint)):
        export_llm(source, tmp_path / folder, ExportOptions(dtype="fp32"))
    expected = logits(open_portable(tmp_path / "floats", 64))
    found = logits(open_portable(tmp_path / "kept", 64))
    assert distances(found, expected).max() < 1e-4
    if name not in ("qwen3moe", "gpt-oss", "nemotron_h_moe", "ternary"):
        return
    weights = next((tmp_path / "kept").glob("*weights*"))
    most = 1.5 if name == "ternary" else 1.2  # codes of one bit take two
    assert weights.stat().st_size < most * (tmp_path / "model.gguf").stat().st_size
    plan = Plan(max_input_len=48, kv_capacity=64, threads=1, options=CpuOptions("edgellm"))
    engine = tmp_path / "engine"
    manifest = build_engine("llm", tmp_path / "kept", engine, plan, "onnxruntime", lambda _: None)
    assert "tokens, relative error" in manifest.options["checks"][0]
    errors = distances(logits(open_decoder(engine, manifest)), expected)
    assert np.quantile(errors, 0.25) < 0.05  # rounded inputs send rows to other experts


def test_mixed_formats_of_experts_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setitem(FILES, "mixed", ("qwen3moe", {}, {**KINDS, "ffn_gate_exps": "Q8_0"}))
    checkpoint = open_checkpoint(str(write(tmp_path, "mixed")))
    with pytest.raises(
        UnsupportedModelError, match="of the experts are quantized differently"
    ) as e:
        export_llm(checkpoint, tmp_path / "bundle", ExportOptions(dtype="fp16"))
    assert "--dtype fp32" in e.value.hint
    export_llm(checkpoint, tmp_path / "bundle", ExportOptions(dtype="fp32"))


def test_a_damaged_scale_of_mxfp4_is_rejected(tmp_path):
    path = write(tmp_path, "gpt-oss")
    reader = gguf.GGUFReader(path, "r+")
    tensor = next(each for each in reader.tensors if each.name == "blk.1.ffn_down_exps.weight")
    tensor.data.reshape(-1)[17 * 5] = 255
    reader.data.flush()
    with pytest.raises(BrokenArtifactError, match=r"experts\.down_proj\.weight holds values"):
        export_llm(open_checkpoint(str(path)), tmp_path / "bundle", ExportOptions(dtype="fp16"))
    assert not (tmp_path / "bundle").exists()
