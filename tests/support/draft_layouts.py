"""Public layouts of drafts, each as its project writes it, and their base."""

from __future__ import annotations

from eagle_reference import BASE_LAYERS, VOCAB, Layout

from edgellm.export import models

BASE = {**models.find("llama").TINY, "num_hidden_layers": BASE_LAYERS}
_MODELOPT = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": None,
}
_SPECFORGE = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40}
_AUX = "eagle_aux_hidden_state_layer_ids"
_SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "speculators_config": {"algorithm": "eagle3"},
    "draft_vocab_size": 40,
    "model_type": "speculator_model",
}

LAYOUTS = {
    "safeailab_bin": Layout(
        {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 40}, file="pytorch_model.bin"
    ),
    "safeailab_narrow": Layout(
        {"draft_vocab_size": 40, "target_hidden_size": 96}, hidden=48, head_dim=8,
        own_embedding=True,
    ),
    "safeailab_full_vocabulary": Layout(
        {"draft_vocab_size": VOCAB}, draft_vocab=VOCAB, d2t=False, t2d=False
    ),
    "angelslim": Layout(
        {"architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": 40, "rope_theta": 1e6,
         "tie_word_embeddings": True, "use_sliding_window": False, "max_window_layers": 28},
        rope_theta=1e6,
    ),
    "specforge_sharded": Layout(
        {**_SPECFORGE, "eagle_config": {_AUX: [0, 3, 5], "use_aux_hidden_state": True}},
        taps=(1, 4, 6), head_dim=24, file="sharded",
    ),
    "specforge_both_keys": Layout(
        {**_SPECFORGE, "eagle_config": {_AUX: [0, 3, 4], "use_aux_hidden_state": True},
         _AUX: [1, 4, 5]}, taps=(1, 4, 5),
    ),
    "specforge_eagle31": Layout(
        {**_SPECFORGE, "fc_norm": True, "norm_output": True}, fc_norm=True, norm_output=True
    ),
    "modelopt_base_head": Layout(
        {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": None,
         "eagle_config": {_AUX: [1, 3, 4], **_MODELOPT}},
        first="layers.0", own_head=False, draft_vocab=VOCAB, d2t=False, t2d=False, layers=2,
        tied_base=False,
    ),
    "modelopt_without_t2d": Layout(
        {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40,
         "eagle_config": _MODELOPT},
        first="layers.0", t2d=False,
    ),
    "specforge_config_of_the_base": Layout({**_SPECFORGE, "num_hidden_layers": 40}),
    "modelopt_config_of_the_base": Layout(
        {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40,
         "num_hidden_layers": 40, "layer_types": ["full_attention"] * 40},
        first="layers.0", layers=2,
    ),
    "speculators_qwen3": Layout(
        {**_SPECULATORS, _AUX: [1, 3, 4], "norm_before_fc": True,
         "embed_requires_grad": True},
        inner_config={"model_type": "qwen3", "rope_theta": 5e5}, rope_theta=5e5, taps=(1, 3, 4),
        first="layers.0", qk_norm=True, norm_before_residual=True, norm_before_fc=True,
        own_embedding=True,
    ),
    "speculators_llama": Layout(
        {**_SPECULATORS, "norm_before_residual": False, "fc_norm": True}, inner_config={},
        first="layers.0", fc_norm=True, layers=2,
    ),
    "biases": Layout(
        {"draft_vocab_size": 40, "bias": True}, fc_bias=True, qkv_bias=True
    ),
    "five_taps": Layout(
        {**_SPECFORGE, "norm_before_residual": True, "eagle_config": {_AUX: [0, 1, 3, 5, 6]}},
        taps=(1, 2, 4, 6, 7), norm_before_residual=True,
    ),
    "modelopt_norms": Layout(
        {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40,
         "eagle_config": {**_MODELOPT, "norm_before_fc": True, "return_hidden_post_norm": True}},
        norm_before_fc=True, norm_output=True,
    ),
    "peagle": Layout(
        {**_SPECFORGE, "ptd_token_id": 95}, first="layers.0", layers=2, own_embedding=True,
        mask_shape=(1,),
    ),
    "speculators_peagle": Layout(
        {**_SPECULATORS, "speculators_model_type": "peagle", "mask_token_id": 95,
         "speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]},
         "down_sample_ratio": 0.7, "fc_norm": True},
        inner_config={}, first="layers.0", own_embedding=True, norm_before_residual=True,
        fc_norm=True, mask_shape=(1, 1),
    ),
    "speculators_windows": Layout(
        {**_SPECULATORS}, first="layers.0", layers=2, norm_before_residual=True,
        inner_config={"sliding_window": 5, "use_sliding_window": True,
                      "layer_types": ["sliding_attention", "full_attention"]},
        window=5, sliding=(0,),
    ),
    "specforge_window": Layout(
        {**_SPECFORGE, "sliding_window": 4}, layers=2, window=4, sliding=(0, 1)
    ),
    "peagle_window": Layout(
        {**_SPECFORGE, "ptd_token_id": 95, "layer_types": ["sliding_attention"] * 2,
         "sliding_window": 4}, first="layers.0", layers=2, own_embedding=True, mask_shape=(1,),
        window=4, sliding=(0, 1),
    ),
    "automodel_eagle4": Layout(
        {"architectures": ["LlamaForCausalLMEagle4"], "eagle_config": {_AUX: [1, 3, 4]},
         "sliding_window": 4, "fc_norm": True, "norm_output": True},
        first="layers.0", own_embedding=True, draft_vocab=VOCAB, d2t=False, t2d=False, window=4,
        sliding=(0,), fc_norm=True, norm_output=True, rank=24, candidates=20,
    ),
    "automodel_eagle4_of_fewer_tokens": Layout(
        {"architectures": ["LlamaForCausalLMEagle4"], "draft_vocab_size": 40},
        first="layers.0", rank=16, candidates=12,
    ),
    "eagle1": Layout(
        {"architectures": ["LlamaForCausalLM"]}, first="layers.0", eagle1=True, taps=(8,),
        own_embedding=True, own_head=False, draft_vocab=VOCAB, d2t=False, t2d=False, fc_bias=True,
        file="pytorch_model.bin", tied_base=False,
    ),
    "eagle1_without_bias": Layout(
        {"bias": False}, first="layers.0", eagle1=True, taps=(8,), own_head=False,
        draft_vocab=VOCAB, d2t=False, t2d=False, layers=2, qkv_bias=True,
    ),
}  # fmt: skip
