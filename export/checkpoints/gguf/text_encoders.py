"""GGUF files of encoders of texts: BERT, XLM-RoBERTa and ModernBERT.

Source: llama.cpp's `conversion/bert.py`, `src/models/bert.cpp` and `modern-bert.cpp`. Files of
XLM-RoBERTa are those of BERT: converters drop the positions before the first token's. Activations
of BERT are not stored.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.gguf.facts import (
    LAYER_NORM,
    LOCAL_ROPE,
    Config,
    Facts,
    Family,
)
from edgellm.export.config.layer_types import FULL, SLIDING

_PERIOD = 3  # of ModernBERT's layers with full attention, from the first on; llama.cpp's
_HEAD = "cls.weight"  # first layer of a classification head
_OUTPUT = "cls.output.weight"  # last layer of a classification head
_BLOCK = {
    **{
        f"attn_{part}": f"attention.self.{name}"
        for part, name in (("q", "query"), ("k", "key"), ("v", "value"))
    },
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_EMBEDDINGS = {
    "token_embd": "word_embeddings",
    "token_types": "token_type_embeddings",
    "position_embd": "position_embeddings",
    "token_embd_norm": "LayerNorm",
}


def _bert(facts: Facts) -> Config:
    if _OUTPUT in facts.names and not facts.family.ranks:
        raise UnsupportedModelError(
            "the GGUF file has a classification head without BERT's pooler, which converters drop",
            hint="give the model's folder of Hugging Face instead",
        )
    return {
        "model_type": "bert",
        "hidden_act": "gelu",
        "type_vocab_size": facts.metadata.get("tokenizer.ggml.token_type_count", 2),
        "layer_norm_eps": facts.epsilon(),
        "rms_norm_eps": None,
        "rope_parameters": None,
    }


def _ranking(facts: Facts) -> Config:
    """XLM-RoBERTa with a classification head; the table of positions begins with the first."""
    labels = facts.get("classifier.output_labels", [""])
    return {
        **_bert(facts),
        "model_type": "xlm-roberta",
        "pad_token_id": -1,
        "architectures": ["XLMRobertaForSequenceClassification"],
        "num_labels": len(labels),
    }


def _modern_bert(facts: Facts) -> Config:
    if any(name.startswith("cls.") for name in facts.names):
        raise UnsupportedModelError(
            "the GGUF file has a classification head of ModernBERT, whose pooling no file states",
            hint="give the model's folder of Hugging Face instead",
        )
    facts.skip("attention.layer_norm_rms_epsilon")  # the same number, under another name
    pattern = facts.get("attention.sliding_window_pattern", _PERIOD)
    if isinstance(pattern, int):
        pattern = [index % max(pattern, 1) != 0 for index in range(facts.get("block_count"))]
    theta = facts.number("rope.freq_base_swa", 10000.0)
    return {
        "model_type": "modernbert",
        "hidden_activation": facts.get("hidden_activation", "gelu"),
        "local_attention": facts.get("attention.sliding_window"),
        "layer_types": [SLIDING if slides else FULL for slides in pattern],
        "norm_eps": facts.epsilon(),
        "norm_bias": "output_norm.bias" in facts.names,
        "attention_bias": "blk.0.attn_qkv.bias" in facts.names,
        "mlp_bias": "blk.0.ffn_up.bias" in facts.names,
        "rms_norm_eps": None,
        LOCAL_ROPE: {"rope_type": "default", "rope_theta": theta},
    }


def _of_bert(prefix: str) -> dict[str, str]:
    """Names of modules in a checkpoint whose tensors have this prefix."""
    own = {name: f"{prefix}.embeddings.{module}" for name, module in _EMBEDDINGS.items()}
    return {**_BLOCK, **own}


_RANKING = Family(
    read=_ranking,
    names={
        **_of_bert("roberta"),
        "cls": "classifier.dense",
        "cls.output": "classifier.out_proj",
    },
    epsilon=LAYER_NORM,
    is_causal=False,
    ranks=True,
    layers="roberta.encoder.layer",
)
ENCODERS: Mapping[str, Family] = {
    "bert": Family(
        read=_bert,
        names=_of_bert("bert"),
        epsilon=LAYER_NORM,
        is_causal=False,
        layers="bert.encoder.layer",
        variant=lambda facts: _RANKING if _HEAD in facts.names else None,
    ),
    "modern-bert": Family(
        read=_modern_bert,
        names={
            "token_embd": "model.embeddings.tok_embeddings",
            "token_embd_norm": "model.embeddings.norm",
            "output_norm": "model.final_norm",
            "attn_norm": "attn_norm",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.Wo",
            "ffn_norm": "mlp_norm",
            "ffn_up": "mlp.Wi",
            "ffn_down": "mlp.Wo",
        },
        epsilon=LAYER_NORM,
        is_causal=False,
    ),
}
