"""Qwen3.5's encoder: Qwen3-VL's without DeepStack."""

from __future__ import annotations

from edgellm.export.config.reader import ConfigReader
from edgellm.export.visual import qwen3_vl

_VISION = {key: value for key, value in qwen3_vl.TINY["vision_config"].items() if "deep" not in key}
TINY = {
    **qwen3_vl.TINY,
    "model_type": "qwen3_5",
    "vision_config": {**_VISION, "depth": 3},
    "text_config": {
        **qwen3_vl.TINY["text_config"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
}


class Config(qwen3_vl.Config):
    """Qwen3.5's config."""

    @staticmethod
    def read_deepstack(vision: ConfigReader, depth: int) -> tuple[int, ...]:
        """There are none, although some configs have an empty list."""
        del depth
        vision.expect("deepstack_visual_indexes", [])
        return ()


class Model(qwen3_vl.Model):
    """Qwen3-VL's model."""
