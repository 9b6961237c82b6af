"""Families of visual encoders by llama.cpp's projector types: config and image processor.

Sources: llama.cpp's `tools/mtmd/clip.cpp` (keys and their defaults) and `conversion/*.py` (base,
qwenvl, qwen3vl, smolvlm, internvl, gemma, llava, lfm2). A file has no image processor: its facts
become one, with the published limits of the family, which no file has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import BrokenArtifactError, UnsupportedModelError
from edgellm.export.checkpoints.gguf.permutations import Order, interleaved
from edgellm.export.checkpoints.gguf.reader import GGUFFile
from edgellm.export.checkpoints.gguf.visual import names
from edgellm.export.checkpoints.gguf.visual.tensors import EncoderNames, Revert

REMEDY = "give the mmproj file of this model as --mmproj, or none"
TYPE = "clip.projector_type"

Config = dict[str, Any]
_REQUIRED: Any = object()
_QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
# Limits of the publishers' processors: areas in pixels, and tokens and tiles.
_AREAS = {"qwen2": (4 * 28 * 28, 16384 * 28 * 28), "qwen3": (64 * 32 * 32, 16384 * 32 * 32)}
_GEMMA4_IMAGES = {"do_normalize": False, "max_soft_tokens": 280}
_LFM2_LIMITS = {
    "min_image_tokens": 64,
    "max_image_tokens": 256,
    "tile_size": 512,
    "min_tiles": 2,
    "max_tiles": 10,
}
_UNREAD = (  # what tensors and types imply, and keys of older files
    *("clip.has_vision_encoder", "clip.has_text_encoder", "clip.has_llava_projector"),
    *(
        "clip.has_audio_encoder",
        "clip.has_qwen2vl_merger",
        "clip.use_gelu",
        "clip.use_silu",
        "clip.vision.projection_dim",
    ),
    *("clip.vision.attention.layer_norm_epsilon", "clip.vision.feed_forward_length"),
    *("clip.vision.mm_patch_merge_type", "clip.vision.image_size", "clip.vision.projector_type"),
)


class EncoderFacts:
    """Metadata and shapes of an encoder's file; records which keys were read."""

    def __init__(self, file: GGUFFile) -> None:
        """`file`: with `clip.*` keys."""
        self._metadata = file.metadata
        self.shapes = {tensor.name: tensor.shape for tensor in file.tensors}
        self._used = {*_UNREAD, TYPE}
        self.size: int = self.vision("embedding_length")
        self.depth: int = self.vision("block_count")
        self.heads: int = self.vision("attention.head_count")
        self.patch_size: int = self.vision("patch_size")

    def vision(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value of `clip.vision.<key>`.

        Raises:
            BrokenArtifactError: missing without a default.
        """
        return self.get(f"clip.vision.{key}", default)

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value of a whole key; see `vision`."""
        self._used.add(key)
        value = self._metadata.get(key, default)
        if value is _REQUIRED:
            raise BrokenArtifactError(f"it has no {key}", hint=REMEDY)
        return value

    def number(self, key: str, default: float) -> float:
        """A float32 of `clip.vision.<key>` in its shortest decimal form."""
        return float(f"{self.vision(key, default):.7g}")

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; raises `BrokenArtifactError` if there is none."""
        if name not in self.shapes:
            raise BrokenArtifactError(f"it has no tensor {name}", hint=REMEDY)
        return self.shapes[name]

    @property
    def inner_size(self) -> int:
        """Width of a block's network, whose layers older files name the other way around."""
        found = self.shape("v.blk.0.ffn_up.weight")
        return next((each for each in found if each != self.size), self.size)

    def pixels(self) -> Config:
        """Means and deviations of the channels."""
        return {
            key: [float(f"{each:.9g}") for each in self.vision(key)]
            for key in ("image_mean", "image_std")
        }

    def left(self) -> list[str]:
        """Unread keys of the encoder."""
        return sorted(
            key for key in self._metadata if key.startswith("clip.") and key not in self._used
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """What a file becomes."""

    vision: Config  # vision_config
    model: Config  # keys of the whole model's config
    processor: Mapping[str, Config]  # files of the image processor
    width: int  # of its output
    levels: tuple[int, ...] = ()  # blocks with DeepStack levels
    changes: Mapping[str, Revert] = field(default_factory=dict)  # see `EncoderTensors`


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A projector type of llama.cpp."""

    read: Callable[[EncoderFacts], Encoder]
    names: EncoderNames
    texts: Mapping[str, str]  # architectures of language models -> model_type of the whole
    tokens: Mapping[str, str]  # keys of the config for tokens, by their texts
    spare: str = ""  # pattern of tokens without use; one replaces an image token that is missing
    text: Callable[[Config], Config] = lambda _: {}  # keys of text_config that its file lacks
    has_sounds: bool = False  # the file may have an encoder of sounds, too, which is ignored


def _qwen(facts: EncoderFacts, processor: str, series: str) -> Encoder:
    """Facts that all Qwens share."""
    joined, width = facts.shape("mm.0.weight")[-1], facts.shape("mm.2.weight")[0]
    merge = facts.vision("spatial_merge_size", math.isqrt(joined // facts.size))
    least, most = _AREAS[series]
    sizes = {"patch_size": facts.patch_size, "temporal_patch_size": 2}
    image = {
        "image_processor_type": processor,
        **sizes,
        "merge_size": merge,
        **facts.pixels(),
        "min_pixels": facts.vision("image_min_pixels", least),
        "max_pixels": facts.vision("image_max_pixels", most),
    }
    vision = {"depth": facts.depth, "num_heads": facts.heads, **sizes, "spatial_merge_size": merge}
    files = {"preprocessor_config.json": image}
    return Encoder(vision=vision, model={}, processor=files, width=width)


def _qwen2_vl(facts: EncoderFacts) -> Encoder:
    found = _qwen(facts, "Qwen2VLImageProcessor", "qwen2")
    if facts.inner_size % facts.size:
        raise UnsupportedModelError(
            f"networks of {facts.inner_size} with a width of {facts.size}", hint=REMEDY
        )
    own = {
        "embed_dim": facts.size,
        "hidden_size": found.width,
        "mlp_ratio": facts.inner_size // facts.size,
        "hidden_act": "quick_gelu",
    }
    return replace(found, vision={**found.vision, **own})


def _qwen2_5_vl(facts: EncoderFacts) -> Encoder:
    found = _qwen(facts, "Qwen2VLImageProcessor", "qwen2")
    period = facts.vision("n_wa_pattern")
    if not isinstance(period, int) or period < 1:
        raise UnsupportedModelError(
            f"clip.vision.n_wa_pattern = {period} is not positive", hint=REMEDY
        )
    own = {
        "hidden_size": facts.size,
        "out_hidden_size": found.width,
        "intermediate_size": facts.inner_size,
        "hidden_act": "silu",
        "window_size": facts.vision("window_size", 112),
        "fullatt_block_indexes": list(range(period - 1, facts.depth, period)),
    }
    return replace(found, vision={**found.vision, **own})


def _qwen3_vl(facts: EncoderFacts) -> Encoder:
    found = _qwen(facts, "Qwen2VLImageProcessorFast", "qwen3")
    marks = facts.vision("is_deepstack_layers", [])
    levels = tuple(index for index, is_level in enumerate(marks) if is_level)
    own = {
        "hidden_size": facts.size,
        "out_hidden_size": found.width,
        "intermediate_size": facts.inner_size,
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": facts.shape("v.position_embd.weight")[0],
        "deepstack_visual_indexes": list(levels),
    }
    return replace(found, vision={**found.vision, **own}, levels=levels)


def _sizes(facts: EncoderFacts) -> Config:
    """Sizes of a transformer in `vision_config`."""
    return {
        "hidden_size": facts.size,
        "intermediate_size": facts.inner_size,
        "num_hidden_layers": facts.depth,
        "num_attention_heads": facts.heads,
    }


def _siglip(facts: EncoderFacts) -> Config:
    return {**_sizes(facts), "layer_norm_eps": facts.number("attention.layer_norm_epsilon", 1e-6)}


def _tiles(facts: EncoderFacts, usual: int = 2) -> tuple[Config, int, int]:
    """Facts that encoders of tiles share, the scale of the shuffle, and tokens of a tile."""
    image_size, shuffle = facts.vision("image_size"), facts.vision("projector.scale_factor", usual)
    return _siglip(facts), shuffle, (image_size // facts.patch_size // shuffle) ** 2


def _idefics3(facts: EncoderFacts) -> Encoder:
    vision, shuffle, tokens = _tiles(facts)
    image_size = facts.vision("image_size")
    image = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": True,
        "size": {"longest_edge": facts.vision("preproc_image_size", image_size)},
        "max_image_size": {"longest_edge": image_size},
        **facts.pixels(),
    }
    return Encoder(
        vision={**vision, "image_size": image_size, "patch_size": facts.patch_size},
        model={"scale_factor": shuffle},
        processor={
            "preprocessor_config.json": image,
            "processor_config.json": {"image_seq_len": tokens},
        },
        width=facts.shape("mm.model.fc.weight")[0],
    )


def _internvl(facts: EncoderFacts) -> Encoder:
    vision, shuffle, tokens = _tiles(facts)
    image_size = facts.vision("image_size")
    image = {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": image_size, "width": image_size},
        "min_patches": facts.vision("preproc_min_tiles", 1),
        "max_patches": facts.vision("preproc_max_tiles", 12),
        **facts.pixels(),
    }
    own = {
        "image_size": [image_size] * 2,
        "patch_size": [facts.patch_size] * 2,
        "hidden_act": "silu" if facts.get("clip.use_silu", False) else "gelu",
        "attention_bias": "v.blk.0.attn_q.bias" in facts.shapes,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in facts.shapes,
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in facts.shapes else "rms_norm",
        "use_absolute_position_embeddings": "v.position_embd.weight" in facts.shapes,
        "use_mean_pooling": "v.post_ln.weight" not in facts.shapes,
    }
    return Encoder(
        vision={**vision, **own},
        model={"downsample_ratio": 1 / shuffle, "image_seq_length": tokens},
        processor={
            "preprocessor_config.json": image,
            "processor_config.json": {"image_seq_length": tokens},
        },
        width=facts.shape("mm.model.mlp.3.weight")[0],
    )


def _gemma3(facts: EncoderFacts) -> Encoder:
    vision, _, tokens = _tiles(facts, usual=4)
    image_size = facts.vision("image_size")
    image = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": image_size, "width": image_size},
        "image_seq_length": tokens,
        **facts.pixels(),
    }
    return Encoder(
        vision={**vision, "image_size": image_size, "patch_size": facts.patch_size},
        model={"mm_tokens_per_image": tokens},
        processor={"preprocessor_config.json": image},
        width=facts.shape("mm.input_projection.weight")[-1],
        changes={"mm.soft_emb_norm.weight": lambda scales: scales - np.float32(1)},
    )


def _pixtral(facts: EncoderFacts) -> Encoder:
    image_size, merge = facts.vision("image_size"), facts.vision("spatial_merge_size", 1)
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), facts.heads)
    orders = interleaved({**heads, "head_dim": facts.size // facts.heads}).rows
    own = {
        "hidden_act": "silu" if facts.get("clip.use_silu", False) else "gelu",
        "image_size": image_size,
        "patch_size": facts.patch_size,
    }
    image = {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": image_size},
        **facts.pixels(),
    }
    sides = {"patch_size": facts.patch_size, "spatial_merge_size": merge}
    return Encoder(
        vision={**_sizes(facts), **own},
        model={
            "spatial_merge_size": merge,
            "multimodal_projector_bias": "mm.1.bias" in facts.shapes,
        },
        processor={"preprocessor_config.json": image, "processor_config.json": sides},
        width=facts.shape("mm.2.weight")[0],
        changes={
            f"{name}.weight": partial(_in_order, order=order) for name, order in orders.items()
        },
    )


def _in_order(rows: NDArray[np.float32], order: Order) -> NDArray[np.float32]:
    return rows[order()]


def _lfm2(facts: EncoderFacts) -> Encoder:
    shuffle = facts.vision("projector.scale_factor", 2)
    own = {
        "patch_size": facts.patch_size,
        "num_patches": facts.shape("v.position_embd.weight")[0],
    }
    image = {
        "image_processor_type": "Lfm2VlImageProcessor",
        "encoder_patch_size": facts.patch_size,
        "downsample_factor": shuffle,
        **_LFM2_LIMITS,
        **facts.pixels(),
    }
    return Encoder(
        vision={**_siglip(facts), **own},
        model={
            "downsample_factor": shuffle,
            "projector_hidden_size": facts.shape("mm.1.weight")[0],
            "projector_bias": "mm.1.bias" in facts.shapes,
            "projector_use_layernorm": "mm.input_norm.weight" in facts.shapes,
        },
        processor={"preprocessor_config.json": image},
        width=facts.shape("mm.2.weight")[0],
        changes={"v.patch_embd.weight": _channels_last},
    )


def _channels_last(kernel: NDArray[np.float32]) -> NDArray[np.float32]:
    """[d, 3, p, p] -> [d, p * p * 3]."""
    return kernel.transpose(0, 2, 3, 1).reshape(len(kernel), -1)


_ATTENDING: Config = {"use_bidirectional_attention": "vision"}
_GEMMA4_MERGE = 3  # pooled patches along a side, where a file does not say


def _gemma4(facts: EncoderFacts) -> Encoder:
    _require_plain_pixels(facts)
    merge = facts.vision("projector.scale_factor", _GEMMA4_MERGE)
    sides = {"patch_size": facts.patch_size, "pooling_kernel_size": merge}
    own = {
        "num_key_value_heads": facts.heads,
        "head_dim": facts.shape("v.blk.0.attn_q.weight")[0] // facts.heads,
        "rms_norm_eps": facts.number("attention.layer_norm_epsilon", 1e-6),
        "position_embedding_size": facts.shape("v.position_embd.weight")[1],
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in facts.shapes,
        "standardize": "v.std_bias" in facts.shapes,
    }
    image = {"image_processor_type": "Gemma4ImageProcessor", **_GEMMA4_IMAGES, **sides}
    return Encoder(
        vision={**_sizes(facts), **sides, **own},
        model={},
        processor={"preprocessor_config.json": image},
        width=facts.shape("mm.input_projection.weight")[0],
        changes={"v.patch_embd.weight": _channels_last},
    )


def _gemma4_unified(facts: EncoderFacts) -> Encoder:
    _require_plain_pixels(facts)
    merge = facts.vision("projector.scale_factor", _GEMMA4_MERGE)
    sides = {"patch_size": facts.patch_size, "pooling_kernel_size": merge}
    own = {
        "mm_embed_dim": facts.size,
        "output_proj_dims": facts.size,
        "mm_posemb_size": facts.shape("v.position_embd.weight")[1],
        "rms_norm_eps": facts.number("attention.layer_norm_epsilon", 1e-6),
    }
    image = {"image_processor_type": "Gemma4UnifiedImageProcessor", **_GEMMA4_IMAGES, **sides}
    side = facts.patch_size * merge
    last = partial(_planes_last, side=side)
    return Encoder(
        vision={**sides, **own},
        model={},
        processor={"preprocessor_config.json": image},
        width=facts.shape("mm.input_projection.weight")[0],
        changes={
            **dict.fromkeys(
                ("v.patch_embd.weight", "v.patch_norm.1.weight", "v.patch_norm.1.bias"), last
            ),
            "v.position_embd.weight": lambda table: table.transpose(1, 0, 2),
        },
    )


def _require_plain_pixels(facts: EncoderFacts) -> None:
    """Raise `UnsupportedModelError` for files whose pixels are not from 0 to 1."""
    found = facts.pixels()
    if (found["image_mean"], found["image_std"]) != ([0.0] * 3, [1.0] * 3):
        raise UnsupportedModelError(
            f"clip.vision.image_mean = {found['image_mean']} and image_std = {found['image_std']} "
            "should be zeros and ones",
            hint=REMEDY,
        )


def _planes_last(values: NDArray[np.float32], side: int) -> NDArray[np.float32]:
    """[..., 3 * p * p] -> [..., p * p * 3]."""
    planes = values.reshape(*values.shape[:-1], 3, side, side)
    return np.moveaxis(planes, -3, -1).reshape(values.shape)


def _gemma4_images(text: Config) -> Config:
    """Tokens of an image attend to each other in models without per-layer embeddings."""
    has_embeddings = bool(text["hidden_size_per_layer_input"])
    return {} if has_embeddings else _ATTENDING


_GEMMA4_TOKENS = {
    "image_token_id": "<|image|>",
    "boi_token_id": "<|image>",
    "eoi_token_id": "<image|>",
}
FAMILIES: Mapping[str, Family] = {
    "qwen2vl_merger": Family(
        read=_qwen2_vl,
        names=names.QWEN2,
        texts={"qwen2vl": "qwen2_vl"},
        tokens=_QWEN_TOKENS,
    ),
    "qwen2.5vl_merger": Family(
        read=_qwen2_5_vl,
        names=names.QWEN2_5,
        texts={"qwen2vl": "qwen2_5_vl"},
        tokens=_QWEN_TOKENS,
    ),
    "qwen3vl_merger": Family(
        read=_qwen3_vl,
        names=names.QWEN3,
        texts={
            "qwen3vl": "qwen3_vl",
            "qwen3vlmoe": "qwen3_vl_moe",
            "qwen35": "qwen3_5",
            "qwen35moe": "qwen3_5_moe",
        },
        tokens=_QWEN_TOKENS,
    ),
    "idefics3": Family(
        read=_idefics3,
        names=names.IDEFICS3,
        texts={"llama": "idefics3"},
        tokens={"image_token_id": "<image>"},
    ),
    "internvl": Family(
        read=_internvl,
        names=names.INTERNVL,
        texts=dict.fromkeys(("llama", "qwen2", "qwen3", "qwen3moe", "gpt-oss"), "internvl"),
        tokens={"image_token_id": "<IMG_CONTEXT>"},
    ),
    "gemma3": Family(
        read=_gemma3,
        names=names.GEMMA3,
        texts={"gemma3": "gemma3"},
        tokens={"image_token_index": "<image_soft_token>"},
        spare=r"<unused\d+>",  # files from a SentencePiece model lack added tokens
    ),
    "pixtral": Family(
        read=_pixtral,
        names=names.PIXTRAL,
        texts={"mistral3": "mistral3"},
        tokens={"image_token_index": "[IMG]"},
    ),
    "lfm2": Family(
        read=_lfm2,
        names=names.LFM2,
        texts={"lfm2": "lfm2_vl"},
        tokens={"image_token_id": "<image>"},
    ),
    "gemma4v": Family(
        read=_gemma4,
        names=names.GEMMA4,
        texts={"gemma4": "gemma4"},
        tokens=_GEMMA4_TOKENS,
        text=_gemma4_images,
        has_sounds=True,
    ),
    "gemma4uv": Family(
        read=_gemma4_unified,
        names=names.GEMMA4_UNIFIED,
        texts={"gemma4": "gemma4_unified"},
        tokens=_GEMMA4_TOKENS,
        text=lambda _: {"model_type": "gemma4_unified_text", **_ATTENDING},
        has_sounds=True,
    ),
}
