"""The encoder of Qwen3-VL with experts: that of the dense models."""

from __future__ import annotations

from edgellm.export.visual import qwen3_vl
from edgellm.export.visual.qwen3_vl import Config, Model

__all__ = ["TINY", "Config", "Model"]

TINY = {
    **qwen3_vl.TINY,
    "model_type": "qwen3_vl_moe",
    "text_config": {
        **qwen3_vl.TINY["text_config"],
        "model_type": "qwen3_vl_moe_text",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}
