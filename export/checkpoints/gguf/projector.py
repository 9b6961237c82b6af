"""Visual encoders of GGUF models: a file of their own, which llama.cpp calls mmproj.

Sources: llama.cpp's `tools/mtmd/clip.cpp` (keys and their defaults) and `conversion/*.py` (base,
qwenvl, qwen3vl, smolvlm, internvl). A file has no image processor: its facts become one, with the
published limits of the family, which no file has.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgellm.core.commands.output_folder import encoder_files
from edgellm.core.errors import BrokenArtifactError, UnsupportedModelError
from edgellm.export.checkpoints.checkpoint import Checkpoint, TensorInfo, TensorSource
from edgellm.export.checkpoints.gguf import encoder_names
from edgellm.export.checkpoints.gguf.encoder_tensors import EncoderNames, EncoderTensors
from edgellm.export.checkpoints.gguf.reader import GGUFFile, read_gguf

_REMEDY = "give the mmproj file of this model as --mmproj, or none"

Config = dict[str, Any]
_REQUIRED: Any = object()
ENCODER = "clip"  # llama.cpp's architecture of encoders
NO_ENCODER = "none"  # as --mmproj
_TYPE = "clip.projector_type"
_PRECISION = re.compile(r"[-_.]?(bf16|f16|f32|q\d\w*)$")
_PRECISIONS = ("f16", "bf16", "f32", "q8_0")
_QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
# Limits of an image's area that the publishers' processors have.
_AREAS = {"qwen2": (4 * 28 * 28, 16384 * 28 * 28), "qwen3": (64 * 32 * 32, 16384 * 32 * 32)}
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
        self._used = {*_UNREAD, _TYPE}
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
            raise BrokenArtifactError(f"it has no {key}", hint=_REMEDY)
        return value

    def number(self, key: str, default: float) -> float:
        """A float32 of `clip.vision.<key>` in its shortest decimal form."""
        return float(f"{self.vision(key, default):.7g}")

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; raises `BrokenArtifactError` if there is none."""
        if name not in self.shapes:
            raise BrokenArtifactError(f"it has no tensor {name}", hint=_REMEDY)
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
class _Encoder:
    """What a file becomes."""

    vision: Config  # vision_config
    model: Config  # keys of the whole model's config
    processor: Mapping[str, Config]  # files of the image processor
    width: int  # of its output
    levels: tuple[int, ...] = ()  # blocks with DeepStack levels


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """A projector type of llama.cpp."""

    read: Callable[[EncoderFacts], _Encoder]
    names: EncoderNames
    texts: Mapping[str, str]  # architectures of language models -> model_type of the whole
    tokens: Mapping[str, str]  # keys of the config for tokens, by their texts


def _qwen(facts: EncoderFacts, processor: str, series: str) -> _Encoder:
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
    return _Encoder(vision=vision, model={}, processor=files, width=width)


def _qwen2_vl(facts: EncoderFacts) -> _Encoder:
    found = _qwen(facts, "Qwen2VLImageProcessor", "qwen2")
    if facts.inner_size % facts.size:
        raise UnsupportedModelError(
            f"networks of {facts.inner_size} with a width of {facts.size}", hint=_REMEDY
        )
    own = {
        "embed_dim": facts.size,
        "hidden_size": found.width,
        "mlp_ratio": facts.inner_size // facts.size,
        "hidden_act": "quick_gelu",
    }
    return replace(found, vision={**found.vision, **own})


def _qwen2_5_vl(facts: EncoderFacts) -> _Encoder:
    found = _qwen(facts, "Qwen2VLImageProcessor", "qwen2")
    period = facts.vision("n_wa_pattern")
    if not isinstance(period, int) or period < 1:
        raise UnsupportedModelError(
            f"clip.vision.n_wa_pattern = {period} is not positive", hint=_REMEDY
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


def _qwen3_vl(facts: EncoderFacts) -> _Encoder:
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


def _tiles(facts: EncoderFacts) -> tuple[Config, int, int]:
    """Facts that encoders of tiles share, the scale of the shuffle, and tokens of a tile."""
    image_size, shuffle = facts.vision("image_size"), facts.vision("projector.scale_factor", 2)
    vision = {
        "hidden_size": facts.size,
        "intermediate_size": facts.inner_size,
        "num_hidden_layers": facts.depth,
        "num_attention_heads": facts.heads,
        "layer_norm_eps": facts.number("attention.layer_norm_epsilon", 1e-6),
    }
    return vision, shuffle, (image_size // facts.patch_size // shuffle) ** 2


def _idefics3(facts: EncoderFacts) -> _Encoder:
    vision, shuffle, tokens = _tiles(facts)
    image_size = facts.vision("image_size")
    image = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": True,
        "size": {"longest_edge": facts.vision("preproc_image_size", image_size)},
        "max_image_size": {"longest_edge": image_size},
        **facts.pixels(),
    }
    return _Encoder(
        vision={**vision, "image_size": image_size, "patch_size": facts.patch_size},
        model={"scale_factor": shuffle},
        processor={
            "preprocessor_config.json": image,
            "processor_config.json": {"image_seq_len": tokens},
        },
        width=facts.shape("mm.model.fc.weight")[0],
    )


def _internvl(facts: EncoderFacts) -> _Encoder:
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
    return _Encoder(
        vision={**vision, **own},
        model={"downsample_ratio": 1 / shuffle, "image_seq_length": tokens},
        processor={
            "preprocessor_config.json": image,
            "processor_config.json": {"image_seq_length": tokens},
        },
        width=facts.shape("mm.model.mlp.3.weight")[0],
    )


_FAMILIES: Mapping[str, _Family] = {
    "qwen2vl_merger": _Family(
        read=_qwen2_vl,
        names=encoder_names.QWEN2,
        texts={"qwen2vl": "qwen2_vl"},
        tokens=_QWEN_TOKENS,
    ),
    "qwen2.5vl_merger": _Family(
        read=_qwen2_5_vl,
        names=encoder_names.QWEN2_5,
        texts={"qwen2vl": "qwen2_5_vl"},
        tokens=_QWEN_TOKENS,
    ),
    "qwen3vl_merger": _Family(
        read=_qwen3_vl,
        names=encoder_names.QWEN3,
        texts={"qwen3vl": "qwen3_vl", "qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe"},
        tokens=_QWEN_TOKENS,
    ),
    "idefics3": _Family(
        read=_idefics3,
        names=encoder_names.IDEFICS3,
        texts={"llama": "idefics3"},
        tokens={"image_token_id": "<image>"},
    ),
    "internvl": _Family(
        read=_internvl,
        names=encoder_names.INTERNVL,
        texts=dict.fromkeys(("llama", "qwen2", "qwen3", "qwen3moe", "gpt-oss"), "internvl"),
        tokens={"image_token_id": "<IMG_CONTEXT>"},
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A GGUF file's language model."""

    path: Path
    architecture: str  # llama.cpp's
    metadata: Mapping[str, Any]
    checkpoint: Checkpoint


def with_encoder(text: Text, path: Path) -> Checkpoint:
    """The whole model's checkpoint, of a language model and its encoder's file.

    Raises:
        BrokenArtifactError: the encoder's file is damaged, or lacks keys.
        UnsupportedModelError: it is the encoder of another model, or an unsupported one.
    """
    try:
        file = read_gguf(path)
        family, encoder = _read(file)
        _require_fit(text, family, encoder)
        tensors = EncoderTensors(file.tensors, family.names, encoder.levels)
    except (OSError, ValueError, OverflowError) as error:
        raise BrokenArtifactError(
            f"{path} is not a whole GGUF file ({error})", hint="download or copy it again"
        ) from None
    except BrokenArtifactError as error:
        raise BrokenArtifactError(
            f"{path} is no visual encoder: {error}", hint="download or copy it again"
        ) from None
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{path} is not a visual encoder for {text.path}: {error}",
            hint="give its own mmproj file as --mmproj, or none for a model of text",
        ) from None
    except (IndexError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise BrokenArtifactError(
            f"{path} holds damaged metadata ({error})", hint="download or copy it again"
        ) from None
    ids = {key: _token_id(text, token) for key, token in family.tokens.items()}
    config = {
        "model_type": _model_type(text, family),
        "text_config": text.checkpoint.config,
        "vision_config": encoder.vision,
        "tie_word_embeddings": text.checkpoint.config["tie_word_embeddings"],
        **encoder.model,
        **ids,
    }
    files = {name: json.dumps(each, indent=2).encode() for name, each in encoder.processor.items()}
    return replace(
        text.checkpoint,
        config=config,
        tensors=_Union(text.checkpoint.tensors, tensors),
        processor_files=files,
    )


def find_encoder(text: Text) -> Path | None:
    """The encoder's file next to a language model: a name with `mmproj`, and facts that fit.

    Of several precisions of one encoder, the first of `_PRECISIONS`.

    Raises:
        BrokenArtifactError: a file is damaged.
        UnsupportedModelError: encoders of several models fit.
    """
    found = [path for path in encoder_files(text.path) if _fits(text, path)]
    titles = {_PRECISION.sub("", path.stem.lower()) for path in found}
    if len(titles) > 1:
        raise UnsupportedModelError(
            f"several visual encoders fit {text.path}: {', '.join(path.name for path in found)}",
            hint="name one as --mmproj, or give --mmproj none for a model of text",
        )
    return min(found, key=lambda path: precision_rank(path.name), default=None)


def precision_rank(name: str) -> tuple[int, str]:
    """Order of an encoder's files by their precision: half precision first, then larger ones."""
    kind = _PRECISION.search(name.lower().removesuffix(".gguf"))
    known = kind is not None and kind[1] in _PRECISIONS
    return (_PRECISIONS.index(kind[1]) if kind and known else len(_PRECISIONS)), name


def languages() -> set[str]:
    """llama.cpp's architectures of language models whose encoders are supported."""
    return {text for family in _FAMILIES.values() for text in family.texts}


def _fits(text: Text, path: Path) -> bool:
    try:
        with_encoder(text, path)
    except UnsupportedModelError:
        return False
    return True


def _read(file: GGUFFile) -> tuple[_Family, _Encoder]:
    metadata = file.metadata
    if metadata.get("general.architecture") != ENCODER:
        raise UnsupportedModelError("it holds no visual encoder", hint=_REMEDY)
    kind = metadata.get(_TYPE, metadata.get("clip.vision.projector_type"))
    if (family := _FAMILIES.get(str(kind))) is None:
        raise UnsupportedModelError(
            f"projector {kind!r} (supported: {', '.join(_FAMILIES)})", hint=_REMEDY
        )
    if metadata.get("clip.has_audio_encoder"):
        raise UnsupportedModelError("it has an audio encoder, too", hint=_REMEDY)
    facts = EncoderFacts(file)
    encoder = family.read(facts)
    if left := facts.left():
        raise UnsupportedModelError(
            f"keys that edgellm does not understand: {', '.join(left)}", hint=_REMEDY
        )
    return family, encoder


def _require_fit(text: Text, family: _Family, encoder: _Encoder) -> None:
    """Compare what both files say.

    Raises:
        UnsupportedModelError: they belong to different models.
    """
    if text.architecture not in family.texts:
        raise UnsupportedModelError(
            f"it is for {' or '.join(family.texts)}, the language model is {text.architecture}",
            hint=_REMEDY,
        )
    width = text.checkpoint.config["hidden_size"]
    if encoder.width != width:
        raise UnsupportedModelError(
            f"it gives vectors of {encoder.width}, the language model has {width}", hint=_REMEDY
        )
    levels = text.metadata.get(f"{text.architecture}.n_deepstack_layers", 0)
    if len(encoder.levels) != levels:
        raise UnsupportedModelError(
            f"it has {len(encoder.levels)} levels of DeepStack, the language model {levels}",
            hint=_REMEDY,
        )
    for token in family.tokens.values():
        _token_id(text, token)


def _token_id(text: Text, token: str) -> int:
    tokens = text.metadata["tokenizer.ggml.tokens"]
    if token not in tokens:
        raise UnsupportedModelError(f"the language model has no token {token}", hint=_REMEDY)
    return tokens.index(token)


def _model_type(text: Text, family: _Family) -> str:
    """The whole model's type; SmolVLM2, which takes videos, is known by its name only."""
    found = family.texts[text.architecture]
    titles = (str(text.metadata.get(f"general.{key}", "")) for key in ("name", "basename"))
    is_newer = any("smolvlm2" in title.lower() for title in titles)
    return "smolvlm" if found == "idefics3" and is_newer else found


class _Union:
    """Tensors of two sources with different names."""

    def __init__(self, first: TensorSource, second: TensorSource) -> None:
        self._first, self._second = first, second
        self._infos = {**first.infos(), **second.infos()}

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        return self._infos

    def stream(self, name: str) -> Iterator[memoryview]:
        """See `TensorSource`."""
        return (self._first if name in self._first.infos() else self._second).stream(name)
