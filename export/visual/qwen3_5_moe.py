"""The encoder of Qwen3.5 with experts: that of the dense models."""

from __future__ import annotations

from edgellm.export.models import qwen3_5_moe_text
from edgellm.export.visual import qwen3_5
from edgellm.export.visual.qwen3_5 import Config, Model

__all__ = ["TINY", "Config", "Model"]

TINY = {
    **qwen3_5.TINY,
    "model_type": "qwen3_5_moe",
    "text_config": {
        **qwen3_5_moe_text.TINY,
        "hidden_size": 48,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_parameters": qwen3_5.TINY["text_config"]["rope_parameters"],
    },
}
