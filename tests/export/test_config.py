from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgellm.core.errors import UnsupportedModelError
from edgellm.export import models
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import read_rope


def _read(**changes):
    architecture = models.find("llama")
    reader = ConfigReader({**architecture.TINY, **changes})
    config = architecture.Config.from_hf(reader)
    reader.finish()
    return config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_scale": 0.5}, "does not understand: logit_scale"),
        ({"hidden_act": "sigmoid"}, "hidden_act = 'sigmoid' is not supported"),
        ({"num_attention_heads": "6"}, "num_attention_heads should be int"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"num_key_value_heads": 4}, "6 attention heads cannot share 4"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type longrope needs 'long_factor'"),
        ({"rope_scaling": {"rope_type": "ntk"}}, "rope type 'ntk' is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope type dynamic needs 'factor'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type linear needs 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "odd": 1}}, "not understood: odd"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0 is not positive"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps = -1.0"),
        ({"rope_theta": -5.0}, "must be positive"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {}},
            "both rope_parameters and rope_scaling",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
    ],
)
def test_unsupported_configs_stop_the_export(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        _read(**changes)


def test_switched_off_and_private_keys_are_ignored():
    config = _read(use_parallel_residual=False, logit_scale=None, _note="x")
    assert config.vocab_size == models.find("llama").TINY["vocab_size"]


@pytest.mark.parametrize(
    ("model_type", "key"),
    [("ernie4_5_moe", "num_nextn_predict_layers"), ("starcoder2", "layer_norm_epsilon")],
)
def test_public_configs_have_keys_without_effect(model_type, key):
    architecture = models.find(model_type)
    reader = ConfigReader({**architecture.TINY, key: 1})
    architecture.Config.from_hf(reader)
    reader.finish()


def test_a_new_architecture_is_one_file(tmp_path, monkeypatch):
    (tmp_path / "newarch.py").write_text(
        "from edgellm.export.models.llama import Config, Model\n"
        "from edgellm.export.models import llama\n"
        "TINY = {**llama.TINY, 'model_type': 'newarch'}\n"
    )
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    assert "newarch" in models.supported()
    assert models.find("newarch").TINY["model_type"] == "newarch"


def test_every_architecture_is_documented():
    table = Path(__file__).parents[2].joinpath("docs/reference/models.md").read_text("utf-8")
    assert [name for name in models.supported() if f"`{name}`" not in table] == []


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries"),
        ("gemma2", {"sliding_window": None}, "but no sliding_window"),
        ("gemma2", {"sliding_window": 0}, "sliding_window = 0"),
        ("gemma2", {"sliding_window": 2**70}, "sliding_window is no finite number of 64 bits"),
        ("gemma2", {"attn_logit_softcapping": float("nan")}, "attn_logit_softcapping is no finite"),
        ("gemma2", {"final_logit_softcapping": 10**400}, "final_logit_softcapping is no finite n"),
        ("phi3", {"original_max_position_embeddings": 0}, "original_max.* = 0 must be positive"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping = -1.0 is not pos"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, r"not supported \(only null\)"),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 4}, "names 'chunked_attention'"),
        ("glm4", {"partial_rotary_factor": 0.35}, "11 of the 32 numbers of a head would turn"),
        ("granite", {"logits_scaling": 0}, "logits_scaling = 0.0"),
        ("ministral3", {"original_max_position_embeddings": 8}, r"= 8 is not supported \(only 16"),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}, "without llama_4_scaling_b"),
        ("phi3", {"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' is not supported"),
        ("olmo3", {"rope_parameters": None, "rope_theta": 1e6}, "for which layers it is"),
        ("gemma3_text", {"rope_parameters": {"full_attention": [1]}}, "full_attention should be d"),
        (
            "gemma3_text",
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 8}},
            "rope_scaling has type without rope_type",
        ),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": {**_YARN, "truncate": False}}},
            "rope of full_attention has truncate = False",
        ),
        ("llama", {"rope_parameters": {"rope_type": ["yarn"]}}, r"rope type \['yarn'\] is not"),
        ("llama", {"rope_parameters": {"rope_theta": 10**400}}, "rope_theta is no finite number"),
        ("nemotron_h", {"layers_block_type": [["mamba"]] * 4}, r"names \['mamba'\], which is not"),
        ("lfm3", {"layer_types": ["conv"] * 4}, "no layer attends"),
        ("apertus", {"hidden_act": "silu"}, r"not supported \(only 'xielu'\)"),
        ("apertus", {"rope_parameters": None, "rope_theta": 1e4}, "rope_theta = 10000.0 is not s"),
        ("granite_swa", {"layer_rope_theta": [0, "1", 5, 5]}, "layer_rope_theta has '1'"),
        ("granitemoe_swa", {"shared_intermediate_size": -1}, "shared_intermediate_size = -1"),
        ("olmo_hybrid", {"layer_types": ["linear_attention"] * 3}, "no layer attends"),
        ("kimi_linear", {"mla_use_nope": False}, r"mla_use_nope = False is not supported"),
        ("kimi_linear", {"num_expert_group": 2}, r"n_group = 2 is not supported \(only 1\)"),
        ("kimi_linear", {"num_key_value_heads": 2}, "num_key_value_heads = 2 is not supported"),
        ("kimi_linear", {"linear_attn_config": {"gate": 1}}, "linear_attn_config has gate"),
        ("kimi_linear", {"linear_attn_config": {"head_dim": "1"}}, "linear_head_dim should be int"),
        ("kimi_linear", {"linear_conv_kernel_dim": 1}, "linear attention of"),
        (
            "kimi_linear",
            {
                "layer_types": None,
                "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 2]},
            },
            "linear_attn_config does not list each layer once",
        ),
        ("bamba", {"attn_layer_indices": [3]}, "attn_layer_indices names no layer"),
        ("bamba", {"partial_rotary_factor": 1.0}, r"not supported \(only 0.5\)"),
        ("internlm3", {"mlp_bias": False}, "qkv_bias = True and bias = False"),
        ("internlm3", {"qkv_bias": False}, r"qkv_bias = False is not supported \(only True\)"),
        ("muse_glimmer_text", {"layer_rope_theta": [5e5] * 5}, "layer_rope_theta has 500000.0"),
        ("muse_glimmer_text", {"layer_rope_theta": [0]}, "layer_rope_theta has 1 entries"),
        ("muse_glimmer_text", {"qk_scale_factor": 0}, "qk_scale_factor = 0.0 is not positive"),
        ("laguna", {"gating": False}, "gating = False is not supported"),
        ("laguna", {"gating_types": ["per_element"] * 3}, "gating_types = "),
        ("laguna", {"mlp_layer_types": ["dense", "thin", "sparse"]}, "names 'thin'"),
        ("laguna", {"num_attention_heads_per_layer": [4, 5, 2]}, "5 attention heads of a layer"),
    ],
)
def test_wrong_keys_of_other_families_stop_the_export(model_type, changes, message):
    architecture = models.find(model_type)
    with pytest.raises(UnsupportedModelError, match=message):
        architecture.Config.from_hf(ConfigReader({**architecture.TINY, **changes}))


def test_published_keys_of_kimi_linear_win():
    """Which list layers from 1 on."""
    architecture = models.find("kimi_linear")
    left = {"layer_types", "linear_num_heads", "linear_head_dim", "num_local_experts"}
    config = {key: value for key, value in architecture.TINY.items() if key not in left}
    lists = {"full_attn_layers": [2], "kda_layers": [1, 3]}
    own = {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4, **lists}
    published = {
        "linear_attn_config": own,
        "num_experts": 6,
        "num_experts_per_token": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "mla_use_nope": True,
        "head_dim": 16,  # of another use than in other families
        "rope_theta": 10000.0,
        "model_max_length": 128,
    }
    reader = ConfigReader({**config, **published, "max_position_embeddings": 7})
    found = architecture.Config.from_hf(reader)
    reader.finish()
    expected = architecture.Config.from_hf(ConfigReader(architecture.TINY))
    assert [kind is None for kind in found.kinds] == [True, False, True]
    kinds = {"layer_kinds": ()}  # each is equal to itself only
    assert replace(found, **kinds) == replace(expected, **kinds)


def test_an_original_length_outside_does_not_reach_ropes_by_layer_type():
    """Transformers takes the one inside, or max_position_embeddings."""
    architecture = models.find("gemma3_text")
    config = {**architecture.TINY, "rope_parameters": {"full_attention": _YARN}}
    reader = ConfigReader({**config, "original_max_position_embeddings": 16})
    found, expected = (
        [kind.rope.inv_freq for kind in architecture.Config.from_hf(each).layer_kinds]
        for each in (reader, ConfigReader(config))
    )
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(UnsupportedModelError, match="original_max_position_embeddings"):
        reader.finish()


def test_longrope_has_the_frequencies_of_both_lengths():
    architecture = models.find("phi3")
    config = architecture.Config.from_hf(ConfigReader(architecture.TINY))
    rope = config.layer_kinds[0].rope
    assert (config.max_position_embeddings, rope.original) == (128, 64)
    given = architecture.TINY["rope_parameters"]
    ratio = np.array(given["long_factor"]) / given["short_factor"]
    np.testing.assert_allclose(rope.inv_freq / rope.long_inv_freq, ratio, rtol=1e-6)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 6.0},
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096,
         "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2},
        {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
         "truncate": False, "attention_factor": 1.3},
    ],
    ids=lambda p: "-".join(map(str, p.values())),
)  # fmt: skip
def test_frequencies_equal_transformers(parameters):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_theta": 5e5, **parameters}
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "max_position_embeddings": 131072}
    reference = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(rope)))
    found = read_rope(ConfigReader({"rope_parameters": rope}), 128, 131072)
    np.testing.assert_allclose(found.inv_freq, reference.inv_freq.numpy(), rtol=2e-6)
    assert found.scale == pytest.approx(reference.attention_scaling)


def test_both_spellings_of_rope_agree():
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
    first, second = (read_rope(ConfigReader(config), 64, 128) for config in (old, new))
    np.testing.assert_array_equal(first.inv_freq, second.inv_freq)
