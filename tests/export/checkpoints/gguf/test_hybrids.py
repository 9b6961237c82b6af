"""GGUF files of hybrids, written as llama.cpp's converters write them."""

from __future__ import annotations

import gguf
import gguf_hybrids
import numpy as np
import pytest
from conftest import make_checkpoint
from draft_runs import DraftRun, drive
from gguf_hybrids import HYBRIDS, write_hybrid
from mtp_reference import Reference, make_base

from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import DRAFT_BUNDLE, load_bundle
from edgellm.export.checkpoints.checkpoint import read_whole
from edgellm.export.checkpoints.weights import ONNX_TYPES
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.draft import DraftOptions, HeadOptions, export_draft
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft
from edgellm.export.pipeline.verify import run_portable

IDS = np.random.default_rng(3).integers(9, 96, 30)


def logits(source, output, num_layers=None):
    manifest = export_llm(
        open_checkpoint(str(source)), output, ExportOptions(dtype="fp32", num_layers=num_layers)
    )
    return run_portable(output, manifest, IDS, 20)


def in_q8(_, array):
    kind = gguf.GGMLQuantizationType.Q8_0
    return gguf.quantize(np.ascontiguousarray(array), kind), kind


@pytest.mark.each_change(
    "qwen35moe", "granitehybrid", "falcon-h1_normed", "nemotron_h_moe", "lfm2moe", "kimi-linear"
)
@pytest.mark.parametrize("case", HYBRIDS)
def test_logits_equal_those_of_the_checkpoint(tmp_path, case):
    arch, config = HYBRIDS[case]
    folder = make_checkpoint(tmp_path / "hf", **config)
    write_hybrid(tmp_path / "model.gguf", arch, folder)
    expected = logits(folder, tmp_path / "expected")
    found = logits(tmp_path / "model.gguf", tmp_path / "bundle")
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.parametrize(
    ("case", "changes", "extra", "message"),
    [
        ("granitehybrid", {}, {"rope__scaling__finetuned": True}, "granitehybrid.expert_count = 5"),
        ("bamba", {}, {"rope__dimension_count": 4}, "granitehybrid.rope.dimension_count = 4"),
        ("falcon-h1", {"tie_word_embeddings": True}, {}, "lost the factor of the logits"),
        ("lfm2moe", {}, {"expert_gating_func": 1}, "lfm2moe.expert_gating_func = 1"),
        ("nemotron_h_moe", {}, {"expert_group_count": 4}, "expert_group_count = 4"),
        ("nemotron_h", {}, {"expert_count": 4}, "nemotron_h.expert_count = 4"),
        ("kimi-linear", {}, {"expert_gating_func": 1}, "kimi-linear.expert_gating_func = 1"),
        ("kimi-linear", {}, {"expert_group_count": 2}, "expert_group_count = 2"),
        ("kimi-linear", {}, {"attention__key_length_mla": 40}, "q_proj.weight has shape"),
        ("qwen35", {}, {"attention__clamp_kqv": 8.0}, "not understand: qwen35.attention.clamp_kqv"),
        ("qwen35", {}, {"full_attention_interval": 0}, "damaged metadata"),
        ("qwen35", {}, {"ssm__group_count": 4}, "linear attention of"),
    ],
)
def test_unsupported_metadata_is_rejected(tmp_path, case, changes, extra, message):
    arch, config = HYBRIDS[case]
    folder = make_checkpoint(tmp_path / "hf", **{**config, **changes})
    write_hybrid(tmp_path / "model.gguf", arch, folder, **extra)
    with pytest.raises(EdgeLLMError, match=message):
        logits(tmp_path / "model.gguf", tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_older_files_of_kimi_linear_expand_latent_vectors_by_one_layer(tmp_path, monkeypatch):
    """Also of a model with latent queries."""
    arch, config = HYBRIDS["kimi-linear"]
    sizes = {"q_lora_rank": 24, "linear_head_dim": 12}
    folder = make_checkpoint(tmp_path / "hf", **{**config, **sizes})
    convert = gguf_hybrids.CONVERT[arch]

    def older(name, array, config):
        return iter([(name, array)]) if "kv_b_proj" in name else convert(name, array, config)

    monkeypatch.setitem(gguf_hybrids.CONVERT, arch, older)
    write_hybrid(tmp_path / "model.gguf", arch, folder)
    expected = logits(folder, tmp_path / "expected")
    found = logits(tmp_path / "model.gguf", tmp_path / "bundle")
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_kimi_linears_layer_of_keys_has_the_axes_of_a_linear_layer(tmp_path, kind):
    """Files have [heads, in, out]; rounded numbers are dequantized."""
    arch, config = HYBRIDS["kimi-linear"]
    folder = make_checkpoint(tmp_path / "hf", **{**config, "qk_nope_head_dim": 32})
    number, expected = gguf.GGMLQuantizationType[kind], []

    def encode(name, array):
        floats = np.ascontiguousarray(array, np.float32)
        if "attn_k_b" not in name:
            return floats, gguf.GGMLQuantizationType.F32
        rows = gguf.quantize(floats, number)
        expected.append(gguf.dequantize(rows, number).swapaxes(1, 2))
        return rows, number

    write_hybrid(tmp_path / "model.gguf", arch, folder, encode)
    tensors = open_checkpoint(str(tmp_path / "model.gguf")).tensors
    name = "model.layers.1.self_attn.k_b_proj.weight"
    assert tensors.infos()[name].shape == (6 * 32, 32)
    found = np.frombuffer(
        read_whole(tensors, name), ONNX_TYPES[tensors.infos()[name].dtype].numpy()
    )
    np.testing.assert_array_equal(found.astype(np.float32), expected[0].reshape(-1))


def test_older_files_of_qwen3_next_with_joined_projections_are_read(tmp_path, monkeypatch):
    arch, config = HYBRIDS["qwen3next"]
    folder = make_checkpoint(tmp_path / "hf", **config)
    convert = gguf_hybrids.CONVERT
    monkeypatch.setitem(convert, arch, lambda name, array, _: gguf_hybrids.delta(name, array))
    write_hybrid(tmp_path / "model.gguf", arch, folder)
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    expected, found = (
        read_whole(open_checkpoint(str(path)).tensors, name)
        for path in (folder, tmp_path / "model.gguf")
    )
    assert found == expected


def test_gates_and_ups_may_be_one_tensor(tmp_path, monkeypatch):
    held, plain = [], gguf_hybrids.CONVERT["qwen35moe"]

    def joined(name, array, config):
        if name.endswith(".experts.gate_proj.weight"):
            held.append(array)
        elif name.endswith(".experts.up_proj.weight"):
            layer = name.split(".")[2]
            yield f"blk.{layer}.ffn_gate_up_exps.weight", np.concatenate([held.pop(), array], 1)
        else:
            yield from plain(name, array, config)

    changes = {"moe_intermediate_size": 64, "linear_value_head_dim": 32}
    folder = make_checkpoint(tmp_path / "hf", **{**HYBRIDS["qwen35moe"][1], **changes})
    files = []
    for title, convert in (("apart", plain), ("joined", joined)):
        monkeypatch.setitem(gguf_hybrids.CONVERT, "qwen35moe", convert)
        files.append(tmp_path / f"{title}.gguf")
        write_hybrid(files[-1], "qwen35moe", folder, in_q8)
    apart, together = (open_checkpoint(str(path)) for path in files)
    for expected, found in ((apart.tensors, together.tensors), (apart.blocks, together.blocks)):
        assert found.infos() == expected.infos()
        for name in expected.infos():
            assert read_whole(found, name) == read_whole(expected, name)


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe"])
def test_multi_token_prediction_is_a_draft(tmp_path, arch):
    base = make_base(tmp_path / "hf", HYBRIDS[arch][1]["model_type"])
    path = tmp_path / "model.gguf"
    write_hybrid(path, arch, base)
    checkpoint = open_checkpoint(str(path))
    options = ExportOptions(dtype="fp32", draft_model_dir=str(path))
    assert export_llm(checkpoint, tmp_path / "base", options).hidden_taps == (4,)
    export_draft(open_draft(str(path)), checkpoint, tmp_path / "draft", DraftOptions("fp32"))
    manifest = load_bundle(tmp_path / "draft", DRAFT_BUNDLE)
    drive(DraftRun(tmp_path / "draft", manifest), Reference(base))


def test_an_mtp_draft_keeps_its_quantized_weights(tmp_path):
    base = make_base(tmp_path / "hf", linear_value_head_dim=32, intermediate_size=96)
    path = tmp_path / "model.gguf"
    write_hybrid(path, "qwen35", base, in_q8)
    checkpoints = open_draft(str(path)), open_checkpoint(str(path))
    manifests = {
        dtype: export_draft(*checkpoints, tmp_path / dtype, DraftOptions(dtype))
        for dtype in ("fp16", "fp32")
    }
    assert {dtype: each.quantization for dtype, each in manifests.items()} == {
        "fp16": "gguf",
        "fp32": "none",
    }
    chosen = DraftOptions("fp16", head=HeadOptions(vocab_size=40))
    found = export_draft(*checkpoints, tmp_path / "chosen", chosen)
    assert (found.quantization, found.draft.draft_vocab_size) == ("gguf", 40)


def test_mtp_layers_are_left_out_of_the_base(tmp_path):
    """Nemotron's is the last block, too."""
    arch, config = HYBRIDS["nemotron_h"]
    folder = make_checkpoint(tmp_path / "hf", **config)
    layers = len(config["layers_block_type"])
    path = tmp_path / "model.gguf"
    write_hybrid(path, arch, folder, block_count=layers, nextn_predict_layers=1)
    expected = logits(folder, tmp_path / "expected", layers - 1)
    found = logits(tmp_path / "model.gguf", tmp_path / "bundle")
    np.testing.assert_allclose(found, expected, atol=2e-4)
