"""GGUF files written by the reference library from tiny transformers models."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import WORDS, make_checkpoint

from edgellm.contract import BrokenArtifactError, UnsupportedModelError
from edgellm.export import models
from edgellm.export.bundle import ExportOptions, export_llm
from edgellm.export.gguf_tokenizer import convert_tokenizer
from edgellm.export.source import open_checkpoint
from edgellm.export.verify import run_portable

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[rest]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def _interleave(array: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order for Llama's q and k: pairs of one frequency side by side."""
    half = len(array) // heads // 2
    return array.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(array.shape)


def write_gguf(path, arch, model, quantization):
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    words = WORDS + [f"w{i}" for i in range(len(WORDS), config.vocab_size - 2)]
    writer.add_token_list([*words, "w", "9"])
    writer.add_token_types([3 if i in (1, 2) else 1 for i in range(config.vocab_size)])
    writer.add_token_merges(["w 9"])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            is_query = ".q_proj." in name
            heads = config.num_attention_heads if is_query else config.num_key_value_heads
            array = _interleave(array, heads)
        if array.ndim == 2 and quantization is not None:
            kind = getattr(gguf.GGMLQuantizationType, quantization)
            writer.add_tensor(_gguf_name(name), gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("quantization", [None, "F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_logits_equal_transformers(tmp_path, arch, quantization):
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        make_checkpoint(tmp_path / "hf", **{**models.find(arch).TINY, "intermediate_size": 96})
    )
    write_gguf(tmp_path / "model.gguf", arch, model, quantization)
    if quantization is not None:  # the reference computes with the same rounded weights
        kind = getattr(gguf.GGMLQuantizationType, quantization)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    packed = gguf.quantize(parameter.numpy(), kind)
                    parameter.copy_(torch.from_numpy(gguf.dequantize(packed, kind)))
    checkpoint = open_checkpoint(str(tmp_path / "model.gguf"))
    manifest = export_llm(checkpoint, tmp_path / "bundle", ExportOptions("fp32"))
    assert manifest.eos_token_ids == (2, 7)
    ids = np.random.default_rng(3).integers(9, 96, 30)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    found = run_portable(tmp_path / "bundle", manifest, ids, 20)
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_rope_factors_divide_the_frequencies():
    from edgellm.export.config import ConfigReader
    from edgellm.export.rope import read_rope

    factors = [1.0, 1.0, 2.0, 8.0]
    plain = read_rope(ConfigReader({}), 8, 128).inv_freq
    scaled = read_rope(
        ConfigReader({"rope_parameters": {"rope_type": "factors", "factors": factors}}), 8, 128
    ).inv_freq
    np.testing.assert_allclose(scaled, plain / np.array(factors), rtol=1e-6)


def test_damaged_files(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF\x03\x00")
    with pytest.raises(BrokenArtifactError, match="not a whole GGUF file"):
        open_checkpoint(str(path))


def test_a_file_cut_inside_its_tensors(tmp_path, smollm2_gguf):
    path = tmp_path / "cut.gguf"
    with smollm2_gguf.open("rb") as stream:
        path.write_bytes(stream.read(20_000_000))
    with pytest.raises(BrokenArtifactError, match="not a whole GGUF file"):
        open_checkpoint(str(path))


def test_unknown_tokenizers_are_refused():
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen3",
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": [],
    }
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer 'qwen3'") as caught:
        convert_tokenizer(metadata.get)
    assert "qwen2" in caught.value.hint.removeprefix("supported: ").split(", ")


def test_sentencepiece_merges_follow_the_scores():
    from tokenizers import Tokenizer

    tokens = ["<unk>", "<s>", "</s>", "<0x41>", "▁", "a", "b", "ab", "▁a"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0, 0, 0, 0, -9, -8, -7, -3, -2],
        "tokenizer.ggml.token_type": [2, 3, 3, 6, 1, 1, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    files = convert_tokenizer(metadata.get)
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert tokenizer.encode("ab").tokens == ["<s>", "▁a", "b"]  # ▁a scores above ab
    assert tokenizer.encode("A", add_special_tokens=False).tokens == ["▁", "<0x41>"]
    assert tokenizer.decode(tokenizer.encode("ab").ids) == "ab"
