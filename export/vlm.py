"""The language model inside a vision-language checkpoint, as a checkpoint of its own.

Transformers 5 nests its config in `text_config` and names its tensors `model.language_model.*`;
older checkpoints of the hub have flat configs and other prefixes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgellm.contract import ImageSpec, UnsupportedModelError
from edgellm.export.checkpoint import Checkpoint, TensorInfo, TensorSource
from edgellm.export.config import ConfigReader


@dataclass(frozen=True, slots=True)
class _Family:
    text_type: str = ""  # the architecture of the text tower; "": its config says it
    # Of configs that hold the text tower's keys and these side by side.
    other_keys: tuple[str, ...] = ()
    interleaves_axes: bool = False  # of M-RoPE, also where its config does not say so


_QWEN_KEYS = (
    "vision_config", "image_token_id", "video_token_id", "vision_start_token_id",
    "vision_end_token_id", "vision_token_id",
)  # fmt: skip
_FAMILIES = {
    "qwen2_vl": _Family("qwen2", _QWEN_KEYS),
    "qwen2_5_vl": _Family("qwen2", _QWEN_KEYS),
    "qwen3_vl": _Family("qwen3", interleaves_axes=True),
    "internvl": _Family(),
    "idefics3": _Family(),
    "smolvlm": _Family(),
}
_TEXT_PREFIXES = (
    "model.language_model.", "language_model.model.", "model.text_model.", "model.",
)  # fmt: skip
_HEAD_PREFIXES = ("lm_head.", "language_model.lm_head.")
# What Idefics3's text configs say of its connector and of training.
_NOT_TEXT = ("neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor", "use_resampler")


def is_vlm(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint holds a visual encoder beside its language model."""
    return checkpoint.config.get("model_type") in _FAMILIES


def supported() -> list[str]:
    """The model types of vision-language models."""
    return sorted(_FAMILIES)


def text_tower(checkpoint: Checkpoint) -> tuple[Checkpoint, ImageSpec | None]:
    """The language model of a checkpoint, and how it takes images (None for a text-only one).

    Raises:
        UnsupportedModelError: the config of the whole does not say what is needed.
    """
    if not is_vlm(checkpoint):
        return checkpoint, None
    config = checkpoint.config
    model_type = config["model_type"]
    reader = ConfigReader(config)
    spec = ImageSpec(model_type, reader.read("image_token_id", int), _num_deepstack(reader))
    tower = replace(
        checkpoint, config=_text_config(config), tensors=_TextTensors(checkpoint.tensors)
    )
    return tower, spec


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    family = _FAMILIES[config["model_type"]]
    text = config.get("text_config")
    if text is None and family.other_keys:
        text = {key: value for key, value in config.items() if key not in family.other_keys}
    if not isinstance(text, dict):
        raise UnsupportedModelError("config.json has no text_config")
    # Either place may say so; transformers 5 reads the outer one.
    tied = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    text = {key: value for key, value in text.items() if key not in _NOT_TEXT}
    model_type = family.text_type or text.get("model_type")
    for key in ("rope_parameters", "rope_scaling"):
        if family.interleaves_axes and isinstance(text.get(key), dict):
            text[key] = {**text[key], "mrope_interleaved": True}
    return {**text, "tie_word_embeddings": tied, "model_type": model_type}


def _num_deepstack(reader: ConfigReader) -> int:
    indexes = reader.read("vision_config", dict, {}).get("deepstack_visual_indexes") or []
    return len(indexes)


class _TextTensors:
    """The tensors of the language model, under the names that it has on its own."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        names = source.infos()
        prefix = next(
            (p for p in _TEXT_PREFIXES if any(name.startswith(p + "layers.") for name in names)),
            _TEXT_PREFIXES[0],
        )
        self._names = dict(_renamed(names, prefix))

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        infos = self._source.infos()
        return {name: infos[stored] for name, stored in self._names.items()}

    def stream(self, name: str) -> Iterator[memoryview]:
        """See `TensorSource`."""
        return self._source.stream(self._names[name])


def _renamed(names: Mapping[str, TensorInfo], prefix: str) -> Iterator[tuple[str, str]]:
    """Pairs of a plain name and the stored one."""
    visual = ("model.visual.", "model.vision_tower.", "model.vision_model.", "model.connector.",
              "model.multi_modal_projector.")  # fmt: skip
    for name in names:
        if name.startswith(prefix) and not name.startswith(visual):
            yield "model." + name.removeprefix(prefix), name
        for head in _HEAD_PREFIXES:
            if name.startswith(head):
                yield "lm_head." + name.removeprefix(head), name
