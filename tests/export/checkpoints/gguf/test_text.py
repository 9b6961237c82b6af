"""GGUF files of models without recurrent layers, written as llama.cpp's converters write them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from conftest import make_checkpoint
from gguf_hybrids import write_hybrid
from gguf_text import TEXTS

from edgellm.core.errors import EdgeLLMError
from edgellm.export.checkpoints.checkpoint import read_whole
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.verify import run_portable

IDS = np.random.default_rng(3).integers(9, 96, 30)


def logits(source: Path, output: Path) -> np.ndarray:
    manifest = export_llm(open_checkpoint(str(source)), output, ExportOptions(dtype="fp32"))
    return run_portable(output, manifest, IDS, 20)


@pytest.mark.each_change(
    "mistral3",
    "hunyuan-dense",
    "cohere2",
    "gemma3n",
    "gemma4",
    "minicpm3",
    "granitemoe_shared",
    "mixtral",
    "ernie4_5-moe",
    "apertus",
)
@pytest.mark.parametrize("case", TEXTS)
def test_logits_equal_those_of_the_checkpoint(tmp_path, case):
    arch, config = TEXTS[case]
    folder = make_checkpoint(tmp_path / "hf", **config)
    write_hybrid(tmp_path / "model.gguf", arch, folder)
    expected = logits(folder, tmp_path / "expected")
    found = logits(tmp_path / "model.gguf", tmp_path / "bundle")
    np.testing.assert_allclose(found, expected, atol=2e-4)


# Files that llama.cpp computes otherwise: it knows windows of EXAONE 4 with 64 layers only.
UNLIKE_LLAMA_CPP = ("exaone4",)
ROUNDED = {"starcoder2": 5e-3}  # llama.cpp looks GELU up in a table of fp16


@pytest.mark.parametrize("case", sorted(TEXTS.keys() - UNLIKE_LLAMA_CPP))
def test_logits_equal_those_of_llama_cpp(tmp_path, case):
    llama_cpp = pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python")
    arch, config = TEXTS[case]
    path = tmp_path / "model.gguf"
    write_hybrid(path, arch, make_checkpoint(tmp_path / "hf", **config))
    model = llama_cpp.Llama(
        str(path),
        n_ctx=256,
        logits_all=True,
        verbose=False,
        n_threads=1,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
    )
    model.eval(IDS.tolist())
    found = logits(path, tmp_path / "bundle")
    np.testing.assert_allclose(found, model.scores[: len(IDS)], atol=ROUNDED.get(case, 2e-4))


@pytest.mark.parametrize(
    ("case", "changes", "extra", "message"),
    [
        ("mistral3", {}, {"rope__scaling__original_context_length": None}, "without rope.scaling"),
        ("glm4", {}, {"rope__dimension_sections": [8, 4, 4, 0]}, "glm4.rope.dimension_sections"),
        ("cohere2", {}, {"attention__sliding_window": None}, "no cohere2.attention.sliding_window"),
        (
            "cohere2",
            {},
            {"attention__layer_norm_epsilon": None},
            "cohere2.attention.layer_norm_eps",
        ),
        ("minicpm3", {}, {"attention__kv_lora_rank": None}, "no minicpm3.attention.kv_lora_rank"),
        ("minicpm3", {"v_head_dim": 24}, {}, "kv_b_proj.weight has shape"),
        ("ernie4_5-moe", {"num_key_value_heads": 3}, {}, "is no multiple of the experts' 48"),
        ("ernie4_5-moe", {}, {"expert_gating_func": 2}, "ernie4_5-moe.expert_gating_func"),
        ("olmoe", {}, {"attention__clamp_kqv": 8.0}, "olmoe.attention.clamp_kqv"),
        ("granitemoe", {}, {"rope__scaling__finetuned": False}, "without rope"),
        ("mixtral", {}, {"expert_used_count": 9}, "num_experts_per_tok = 9, but num_local_experts"),
        ("gemma3n", {}, {"altup__num_inputs": 3}, "gemma3n.altup.num_inputs = 3"),
        ("starcoder2", {"use_bias": False}, {"expert_count": 2}, "starcoder2.expert_count = 2"),
    ],
)
def test_unsupported_metadata_is_rejected(tmp_path, case, changes, extra, message):
    arch, config = TEXTS[case]
    folder = make_checkpoint(tmp_path / "hf", **{**config, **changes})
    write_hybrid(tmp_path / "model.gguf", arch, folder, **extra)
    with pytest.raises(EdgeLLMError, match=message):
        logits(tmp_path / "model.gguf", tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_blocks_of_projections_in_one_tensor_are_kept(tmp_path):
    """Gemma 3n has projections of hidden states, three in a tensor."""
    arch, config = TEXTS["gemma3n"]
    kind = gguf.GGMLQuantizationType.Q8_0
    stored = {}

    def encode(name, array):
        if name != "altup_unembd_proj.weight":
            return array, gguf.GGMLQuantizationType.F32
        stored[name] = gguf.quantize(np.ascontiguousarray(array), kind)
        return stored[name], kind

    folder = make_checkpoint(tmp_path / "hf", **{**config, "hidden_size": 96})
    write_hybrid(tmp_path / "model.gguf", arch, folder, encode)
    opened = open_checkpoint(str(tmp_path / "model.gguf"))
    (rows,) = stored.values()
    for index in range(3):
        name = f"model.altup_unembed_projections.{index}.weight"
        assert (opened.blocks.infos()[name].dtype, opened.blocks.infos()[name].shape) == (
            "Q8_0",
            (96, 96),
        )
        assert read_whole(opened.blocks, name) == rows[index].tobytes()
        floats = np.frombuffer(read_whole(opened.tensors, name), np.float32).reshape(96, 96)
        np.testing.assert_array_equal(floats, gguf.dequantize(rows[index], kind))
