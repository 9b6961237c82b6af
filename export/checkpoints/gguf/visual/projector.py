"""Visual encoders of GGUF models: a file of their own, which llama.cpp calls mmproj."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgellm.core.commands.output_folder import encoder_files
from edgellm.core.errors import BrokenArtifactError, UnsupportedModelError
from edgellm.export.checkpoints.checkpoint import Checkpoint, TensorInfo, TensorSource
from edgellm.export.checkpoints.gguf.reader import GGUFFile, read_gguf
from edgellm.export.checkpoints.gguf.visual.families import (
    FAMILIES,
    REMEDY,
    TYPE,
    Encoder,
    EncoderFacts,
    Family,
)
from edgellm.export.checkpoints.gguf.visual.tensors import EncoderTensors

ENCODER = "clip"  # llama.cpp's architecture of encoders
NO_ENCODER = "none"  # as --mmproj
_SOUNDS = "clip.audio."  # keys of an encoder of sounds
_SPECIAL = (3, 4)  # types of tokens that tokenizers do not split: control and user-defined
_PRECISION = re.compile(r"[-_.]?(bf16|f16|f32|q\d\w*)$")
_PRECISIONS = ("f16", "bf16", "f32", "q8_0")


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
        tensors = EncoderTensors(
            tensors=file.tensors,
            names=family.names,
            levels=encoder.levels,
            changes=encoder.changes,
        )
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
    named = {key: _held_token(text, token, family) for key, token in family.tokens.items()}
    tokens = text.metadata["tokenizer.ggml.tokens"]
    config = {
        "model_type": _model_type(text, family),
        "text_config": {**text.checkpoint.config, **family.text(text.checkpoint.config)},
        "vision_config": encoder.vision,
        "tie_word_embeddings": text.checkpoint.config["tie_word_embeddings"],
        **encoder.model,
        **{key: tokens.index(token) for key, token in named.items()},
    }
    files = {name: json.dumps(each, indent=2).encode() for name, each in encoder.processor.items()}
    if replaced := [named[key] for key, token in family.tokens.items() if named[key] != token]:
        files["tokenizer_config.json"] = json.dumps({"image_token": replaced[0]}).encode()
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
    return {text for family in FAMILIES.values() for text in family.texts}


def _fits(text: Text, path: Path) -> bool:
    try:
        with_encoder(text, path)
    except UnsupportedModelError:
        return False
    return True


def _read(file: GGUFFile) -> tuple[Family, Encoder]:
    metadata = file.metadata
    if metadata.get("general.architecture") != ENCODER:
        raise UnsupportedModelError("it holds no visual encoder", hint=REMEDY)
    kind = metadata.get(TYPE, metadata.get("clip.vision.projector_type"))
    if (family := FAMILIES.get(str(kind))) is None:
        raise UnsupportedModelError(
            f"projector {kind!r} (supported: {', '.join(FAMILIES)})", hint=REMEDY
        )
    if metadata.get("clip.has_audio_encoder") and not family.has_sounds:
        raise UnsupportedModelError("it has an audio encoder, too", hint=REMEDY)
    facts = EncoderFacts(file)
    encoder = family.read(facts)
    ignored = _SOUNDS if family.has_sounds else ()
    if left := [key for key in facts.left() if not key.startswith(ignored)]:
        raise UnsupportedModelError(
            f"keys that edgellm does not understand: {', '.join(left)}", hint=REMEDY
        )
    return family, encoder


def _require_fit(text: Text, family: Family, encoder: Encoder) -> None:
    """Compare what both files say.

    Raises:
        UnsupportedModelError: they belong to different models.
    """
    if text.architecture not in family.texts:
        raise UnsupportedModelError(
            f"it is for {' or '.join(family.texts)}, the language model is {text.architecture}",
            hint=REMEDY,
        )
    width = text.checkpoint.config["hidden_size"]
    if encoder.width != width:
        raise UnsupportedModelError(
            f"it gives vectors of {encoder.width}, the language model has {width}", hint=REMEDY
        )
    levels = text.metadata.get(f"{text.architecture}.n_deepstack_layers", 0)
    if len(encoder.levels) != levels:
        raise UnsupportedModelError(
            f"it has {len(encoder.levels)} levels of DeepStack, the language model {levels}",
            hint=REMEDY,
        )
    for token in family.tokens.values():
        _held_token(text, token, family)


def _held_token(text: Text, token: str, family: Family) -> str:
    """The token, or the last spare one if the language model lacks it."""
    tokens = text.metadata["tokenizer.ggml.tokens"]
    if token in tokens:
        return token
    kinds = text.metadata.get("tokenizer.ggml.token_type", [])
    spare = [
        held
        for held, kind in zip(tokens, kinds, strict=False)
        if kind in _SPECIAL and family.spare and re.fullmatch(family.spare, held)
    ]
    if not spare:
        raise UnsupportedModelError(f"the language model has no token {token}", hint=REMEDY)
    return spare[-1]


def _model_type(text: Text, family: Family) -> str:
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
