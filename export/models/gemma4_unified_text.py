"""Gemma 4 12B, the language model: Gemma 4's, without per-layer embeddings and experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from edgellm.export.models import gemma4_text

TINY = {
    key: value
    for key, value in gemma4_text.TINY.items()
    if key not in ("vocab_size_per_layer_input", "hidden_size_per_layer_input")
}
TINY |= {
    "model_type": "gemma4_unified_text",
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(gemma4_text.Config):
    """Gemma 4's config with other defaults."""

    DEFAULTS: ClassVar[dict[str, Any]] = gemma4_text.Config.DEFAULTS | {
        "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
    }


Model = gemma4_text.Model
