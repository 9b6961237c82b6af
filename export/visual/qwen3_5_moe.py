"""The encoder of Qwen3.5 with experts: that of the dense models."""

from __future__ import annotations

from edgellm.export.visual import qwen3_5
from edgellm.export.visual.qwen3_5 import Config, Model

__all__ = ["TINY", "Config", "Model"]

TINY = {
    **qwen3_5.TINY,
    "model_type": "qwen3_5_moe",
    "text_config": {
        **qwen3_5.TINY["text_config"],
        "model_type": "qwen3_5_moe_text",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
}
