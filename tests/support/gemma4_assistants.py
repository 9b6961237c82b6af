"""Gemma 4's assistants with tiny random weights, and transformers' steps with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from conftest import make_checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma4AssistantForCausalLM,
    Gemma4UnifiedAssistantForCausalLM,
)

from edgellm.export import models

BASE, UNIFIED = (models.find(f"gemma4{kind}_text").TINY for kind in ("", "_unified"))
HIDDEN, VOCAB = BASE["hidden_size"], BASE["vocab_size"]
SLIDING, FULL = "sliding_attention", "full_attention"
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 3}
TEXT = {
    **{key: BASE[key] for key in ("head_dim", "global_head_dim", "hidden_activation")},
    "model_type": "gemma4_text",
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
    "sliding_window": BASE["sliding_window"],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 4,
}
UNIFIED_TEXT = {key: value for key, value in TEXT.items() if "per_layer" not in key}
UNIFIED_TEXT |= {
    "model_type": UNIFIED["model_type"],
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
_CLASSES = {
    "gemma4": Gemma4AssistantForCausalLM,
    "gemma4_unified": Gemma4UnifiedAssistantForCausalLM,
}
# Text configs of an assistant, and its base
FORMS = {"gemma4": (TEXT, BASE), "gemma4_unified": (UNIFIED_TEXT, UNIFIED)}


def make_base(folder: Path, form: str = "gemma4", **changes: object) -> Path:
    """A base with shared keys and values, and heads of two sizes."""
    return make_checkpoint(folder, **{**FORMS[form][1], **changes})


def make_assistant(folder: Path, form: str = "gemma4", text: Any = None, **changes: object) -> Path:
    """An assistant of `make_base`, with centroids by `CLUSTERS`; `text`: another `text_config`."""
    torch.manual_seed(5)
    text_config = AutoConfig.for_model(**(FORMS[form][0] if text is None else text))
    config = AutoConfig.for_model(
        f"{form}_assistant", text_config=text_config, backbone_hidden_size=HIDDEN, **changes
    )
    model = _CLASSES[form](config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
        if model.masked_embedding is not None:
            model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    model.save_pretrained(folder)
    return folder


@dataclass
class Step:
    """A step of an assistant: log-probabilities [V] of the tokens it proposes, and its state."""

    log_probs: torch.Tensor  # -inf: not proposed
    hidden: torch.Tensor  # [H]


class Oracle:
    """Transformers' base and assistant."""

    def __init__(self, base: Path, assistant: Path) -> None:
        eager = {"attn_implementation": "eager"}
        self.base = AutoModelForCausalLM.from_pretrained(base, **eager)
        form = AutoConfig.from_pretrained(assistant).model_type.removesuffix("_assistant")
        self.assistant = _CLASSES[form].from_pretrained(assistant, **eager)

    def read(self, ids: list[int], taps: tuple[int, ...]) -> torch.Tensor:
        """Remember the base's keys and values of a text; its hidden taps [S, T*H]."""
        with torch.no_grad():
            found = self.base(
                torch.tensor(ids)[None],
                use_cache=False,
                output_hidden_states=True,
                return_shared_kv_states=True,
            )
        self.kv = dict(found.shared_kv_states)
        return torch.cat([found.hidden_states[tap][0] for tap in taps], -1)

    def step(self, token: int, hidden: torch.Tensor, length: int) -> Step:
        """What follows `token` after a text whose first `length` tokens have keys and values."""
        embedded = self.base.get_input_embeddings()(torch.tensor([[token]]))
        with torch.no_grad():
            found = self.assistant(
                inputs_embeds=torch.cat([embedded, hidden[None, None]], -1),
                position_ids=torch.tensor([[length]]),
                shared_kv_states={
                    kind: tuple(part[:, :, :length] for part in pair)
                    for kind, pair in self.kv.items()
                },
            )
        logits = found.logits[0, 0]
        if self.assistant.masked_embedding is not None:  # others have the least value less one
            logits = logits.masked_fill(logits == logits.min(), -torch.inf)
        return Step(logits.log_softmax(-1), found.last_hidden_state[0, 0])
