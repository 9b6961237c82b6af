"""Names of the tensors of visual encoders, llama.cpp's to Hugging Face's.

Source: llama.cpp's `gguf-py/gguf/tensor_mapping.py` and `conversion/*.py` (qwenvl, qwen3vl,
smolvlm, internvl, gemma, llava, lfm2).
"""

from __future__ import annotations

from edgellm.export.checkpoints.gguf.visual.tensors import EncoderNames

_VISUAL = "model.visual"
_SOUNDS = ("a.", "mm.a.")  # prefixes of the encoder of sounds in the same file
_TOWER, _PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
_QWEN_BLOCK = {"attn_qkv": "attn.qkv", "attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"}
_PATCHES = {"v.patch_embd": f"{_VISUAL}.patch_embed.proj"}
_MERGER = {
    "v.post_ln": f"{_VISUAL}.merger.ln_q",
    "mm.0": f"{_VISUAL}.merger.mlp.0",
    "mm.2": f"{_VISUAL}.merger.mlp.2",
}
QWEN2 = EncoderNames(
    root=_VISUAL,
    blocks="blocks",
    block={**_QWEN_BLOCK, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    tensors={**_PATCHES, **_MERGER},
    qkv="attn.qkv",
)
QWEN2_5 = EncoderNames(
    root=_VISUAL,
    blocks="blocks",
    block={**_QWEN_BLOCK, **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}},
    tensors={**_PATCHES, **_MERGER},
    qkv="attn.qkv",
)
QWEN3 = EncoderNames(
    root=_VISUAL,
    blocks="blocks",
    block={**_QWEN_BLOCK, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
    tensors={
        **_PATCHES,
        "v.position_embd": f"{_VISUAL}.pos_embed",
        "v.post_ln": f"{_VISUAL}.merger.norm",
        "mm.0": f"{_VISUAL}.merger.linear_fc1",
        "mm.2": f"{_VISUAL}.merger.linear_fc2",
    },
    qkv="attn.qkv",
    deepstack={"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"},
    may_swap=False,
)
_SIGLIP_BLOCK = {
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_SIGLIP_MODULES = {
    "v.patch_embd": "embeddings.patch_embedding",
    "v.position_embd": "embeddings.position_embedding",
    "v.post_ln": "post_layernorm",
}


def _siglip(root: str, tensors: dict[str, str]) -> EncoderNames:
    """SigLIP below `root`, and `tensors` of a projector."""
    own = {name: f"{root}.{module}" for name, module in _SIGLIP_MODULES.items()}
    return EncoderNames(
        root=root, blocks="encoder.layers", block=_SIGLIP_BLOCK, tensors={**own, **tensors}
    )


IDEFICS3 = _siglip(
    "model.vision_model", {"mm.model.fc": "model.connector.modality_projection.proj"}
)
GEMMA3 = _siglip(
    _TOWER,
    {
        "mm.input_projection.weight": f"{_PROJECTOR}.mm_input_projection_weight",
        "mm.soft_emb_norm": f"{_PROJECTOR}.mm_soft_emb_norm",
    },
)
LFM2 = _siglip(
    _TOWER,
    {
        "mm.input_norm": f"{_PROJECTOR}.layer_norm",
        "mm.1": f"{_PROJECTOR}.linear_1",
        "mm.2": f"{_PROJECTOR}.linear_2",
    },
)
PIXTRAL = EncoderNames(
    root=_TOWER,
    blocks="transformer.layers",
    block={
        **{f"attn_{part}": f"attention.{part}_proj" for part in "qkv"},
        "attn_out": "attention.o_proj",
        "ln1": "attention_norm",
        "ln2": "ffn_norm",
        **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    },
    tensors={
        "v.patch_embd": f"{_TOWER}.patch_conv",
        "v.pre_ln": f"{_TOWER}.ln_pre",
        "mm.input_norm": f"{_PROJECTOR}.norm",
        "mm.patch_merger": f"{_PROJECTOR}.patch_merger.merging_layer",
        "mm.1": f"{_PROJECTOR}.linear_1",
        "mm.2": f"{_PROJECTOR}.linear_2",
    },
    unused=("v.token_embd.img_break",),  # a row of the language model's embedding
)
INTERNVL = EncoderNames(
    root=_TOWER,
    blocks="encoder.layer",
    block={
        **{f"attn_{part}": f"attention.{part}_proj" for part in "qkv"},
        **{f"attn_{part}_norm": f"attention.{part}_norm" for part in "qk"},
        "attn_out": "attention.projection_layer",
        "ln1": "layernorm_before",
        "ln2": "layernorm_after",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    },
    parameters={"ls1": "lambda_1", "ls2": "lambda_2"},
    tensors={
        "v.class_embd": f"{_TOWER}.embeddings.cls_token",
        "v.patch_embd": f"{_TOWER}.embeddings.patch_embeddings.projection",
        "v.position_embd.weight": f"{_TOWER}.embeddings.position_embeddings",
        "v.post_ln": f"{_TOWER}.layernorm",
        "mm.model.mlp.0": f"{_PROJECTOR}.layer_norm",
        "mm.model.mlp.1": f"{_PROJECTOR}.linear_1",
        "mm.model.mlp.3": f"{_PROJECTOR}.linear_2",
    },
    ranks={"v.class_embd": 3, "v.position_embd.weight": 3},
    may_swap=False,
)
_EMBEDDER = "model.vision_embedder"
_PROJECTION = {"mm.input_projection": "model.embed_vision.embedding_projection"}
GEMMA4 = EncoderNames(
    root=_TOWER,
    blocks="encoder.layers",
    block={
        **{f"attn_{part}": f"self_attn.{part}_proj.linear" for part in "qkv"},
        **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
        "attn_out": "self_attn.o_proj.linear",
        "ln1": "input_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "ln2": "pre_feedforward_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
        **{f"ffn_{part}": f"mlp.{part}_proj.linear" for part in ("gate", "up", "down")},
    },
    tensors={
        "v.patch_embd": f"{_TOWER}.patch_embedder.input_proj",
        "v.position_embd.weight": f"{_TOWER}.patch_embedder.position_embedding_table",
        "v.std_bias": f"{_TOWER}.std_bias",
        "v.std_scale": f"{_TOWER}.std_scale",
        **_PROJECTION,
    },
    may_swap=False,
    ignored=_SOUNDS,
)
GEMMA4_UNIFIED = EncoderNames(
    root=_EMBEDDER,
    blocks="",
    block={},
    tensors={
        "v.patch_norm.1": f"{_EMBEDDER}.patch_ln1",
        "v.patch_embd": f"{_EMBEDDER}.patch_dense",
        "v.patch_norm.2": f"{_EMBEDDER}.patch_ln2",
        "v.position_embd.weight": f"{_EMBEDDER}.pos_embedding",
        "v.patch_norm.3": f"{_EMBEDDER}.pos_norm",
        **_PROJECTION,
    },
    may_swap=False,
    ignored=_SOUNDS,
)
