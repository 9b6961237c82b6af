"""Qwen2.5-VL's encoder (arXiv 2502.13923): windows in most blocks, RMS norms, gated networks."""

from __future__ import annotations

from typing import Any

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.visual import expect_language_size, read_indices
from edgellm.export.layers.mlp import GatedMLP
from edgellm.export.layers.norm import RMSNorm
from edgellm.export.visual import qwen2_vl

TINY = {
    **qwen2_vl.TINY,
    "model_type": "qwen2_5_vl",
    "vision_config": {
        "depth": 4,
        "hidden_size": 32,
        "out_hidden_size": 48,
        "intermediate_size": 40,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 24,
        "fullatt_block_indexes": [1, 3],
    },
}


class Config(qwen2_vl.Config):
    """Qwen2.5-VL's config."""

    @classmethod
    def from_hf(cls, vision: ConfigReader, model: ConfigReader) -> qwen2_vl.Config:
        """Read `vision_config`, and the encoder's keys in the rest of config.json."""
        size = vision.positive("hidden_size", 3584)
        out_size = vision.positive("out_hidden_size", 3584)
        expect_language_size(model, out_size)
        vision.expect("hidden_act", "silu")
        vision.optional("tokens_per_second", object)  # of videos
        shared = cls.shared(vision, size)
        merge = shared["merge_size"]
        window_pixels = vision.positive("window_size", 112)
        window_size = window_pixels // merge // shared["patch_size"] * merge
        if not window_size:
            raise UnsupportedModelError(
                f"config.json: window_size = {window_pixels} is smaller than a block of patches"
            )
        return cls(
            size=size,
            out_size=out_size,
            inner_size=vision.positive("intermediate_size", 3420),
            activation="silu",
            window_size=window_size,
            full_attention=read_indices(vision, "fullatt_block_indexes", (7, 15, 23, 31)),
            **shared,
        )


class Block(qwen2_vl.Block):
    """Block with RMS norms and a gated network."""

    norm = RMSNorm

    def network(self, config: qwen2_vl.Config, weights: Weights) -> Any:
        """The feed-forward network."""
        return GatedMLP(weights=weights, size=config.size, inner_size=config.inner_size, bias=True)


class Merger(qwen2_vl.Merger):
    """Merger with an RMS norm."""

    norm = RMSNorm


class Model(qwen2_vl.Model):
    """Patch embedding, blocks and merger."""

    block = Block
    merger_type = Merger
