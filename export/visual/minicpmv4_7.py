"""The encoder of MiniCPM-V 4.7: that of 4.6. Its language model has M-RoPE positions of images."""

from __future__ import annotations

from edgellm.export.visual import minicpmv4_6, qwen3_5
from edgellm.export.visual.minicpmv4_6 import Config, Model

__all__ = ["TINY", "Config", "Model"]

TINY = {
    **minicpmv4_6.TINY,
    "model_type": "minicpmv4_7",
    "vision_config": {**minicpmv4_6.TINY["vision_config"], "model_type": "minicpmv4_7_vision"},
    "text_config": qwen3_5.TINY["text_config"],
    "image_start_id": 85,
    "image_end_id": 86,
    "slice_start_id": 87,
    "slice_end_id": 88,
    "newline_id": 89,
}
