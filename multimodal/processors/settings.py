"""Typed access to a checkpoint's processor files; unknown keys are rejected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from edgellm.core.errors import (
    BrokenArtifactError,
    UnsupportedModelError,
)
from edgellm.core.strict_json import parse

_VIDEO = "video_preprocessor_config.json"
_WHOLE = "processor_config.json"
_OTHERS = "preprocessor_config.json", _WHOLE, "tokenizer_config.json"
FILES = "config.json", *_OTHERS, _VIDEO
T = TypeVar("T")
_REQUIRED: Any = object()
_REMEDY = "take the processor files that were published with the model"

# Ignored keys: storage and backends of other tools, video, and steps that images skip.
_HARMLESS = frozenset(
    [
        "auto_map",
        "chat_template",
        "data_format",
        "default_to_square",
        "device",
        "disable_grouping",
        "do_convert_rgb",
        "do_pad",
        "feature_extractor_type",
        "input_data_format",
        "processor_class",
        "return_row_col_info",
        "return_tensors",
        "transformers_version",
        "video_processor",
        "video_sampling",
    ]
)


class Settings:
    """An object of a JSON file with typed access; records which keys were read."""

    def __init__(self, values: Mapping[str, Any], file: str) -> None:
        """Args: `values`, and `file`, their name in messages."""
        self._values = values
        self.file = file
        self._used: set[str] = set()

    @property
    def is_empty(self) -> bool:
        """Whether there are no keys."""
        return not self._values

    def read(self, key: str, kind: type[T], default: T = _REQUIRED) -> T:
        """The value of `key`; null counts as absent.

        Raises:
            UnsupportedModelError: absent without a default, or of another type.
        """
        self._used.add(key)
        value = self._values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise UnsupportedModelError(f"{self.file} has no {key}", hint=_REMEDY)
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)  # type: ignore[return-value]  # T is float here
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.fault(key, value, f"is not of type {kind.__name__}")
        return value

    def positive(self, key: str, default: int = _REQUIRED) -> int:
        """The value of `key`, an integer of at least 1."""
        value = self.read(key, int, default)
        if value < 1:
            raise self.fault(key, value, "is not positive")
        return value

    def side(self, key: str, default: int = _REQUIRED) -> int:
        """The side of a square that is written as one number or as two equal ones."""
        value = self._values.get(key)
        if not isinstance(value, list):
            return self.positive(key, default)
        self._used.add(key)
        if len(value) != 2 or value[0] != value[1] or type(value[0]) is not int or value[0] < 1:
            raise self.fault(key, value, "is not a square")
        return value[0]

    def channels(self, key: str, default: tuple[float, float, float]) -> list[float]:
        """Three numbers, one for each of red, green and blue."""
        values = self.read(key, list, list(default))
        if len(values) != 3 or any(type(value) not in (int, float) for value in values):
            raise self.fault(key, values, "is not three numbers")
        return values

    def section(self, key: str) -> Settings:
        """The object at `key`; empty when absent."""
        return Settings(self.read(key, dict, {}), f"{self.file}: {key}")

    def expect(self, key: str, *allowed: object) -> None:
        """Accept `key` only when it is absent, null or one of `allowed`."""
        self._used.add(key)
        value = self._values.get(key)
        if value is not None and value not in allowed:
            raise self.fault(key, value, f"is not supported (only {', '.join(map(repr, allowed))})")

    def agree(self, key: str, value: int) -> int:
        """Return `value`; reject a different one at `key`."""
        found = self.side(key, value)
        if found != value:
            raise self.fault(key, found, f"should be {value}")
        return value

    def finish(self) -> None:
        """Reject keys that were not read and are not false or empty."""
        left = set(self._values) - self._used - _HARMLESS
        unknown = sorted(
            key
            for key in left
            if not key.startswith("_") and self._values[key] not in (None, False, [], {})
        )
        if unknown:
            raise UnsupportedModelError(
                f"{self.file} has keys that edgellm does not understand: {', '.join(unknown)}",
                hint="pictures might be prepared in another way than the model was trained with",
            )

    def fault(self, key: str, value: object, problem: str) -> UnsupportedModelError:
        """The error for a value that cannot be used."""
        return UnsupportedModelError(f"{self.file}: {key} = {value!r} {problem}", hint=_REMEDY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The image and video settings of a checkpoint."""

    model_type: str
    image: Settings  # preprocessor_config.json, or its successor in processor_config.json
    processor: Settings  # processor_config.json
    model: Settings  # config.json
    tokens: Settings  # names of special tokens, in tokenizer_config.json
    video: Settings  # video_preprocessor_config.json, or its successor; may be empty

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read the JSON files of a checkpoint, or of a folder that they were copied to.

        Raises:
            BrokenArtifactError: config.json or the image processor's settings are missing, or
                a file is not a JSON object.
            UnsupportedModelError: config.json names no model type.
        """
        processor = _load(folder / _WHOLE)
        file = "preprocessor_config.json"
        # transformers 5 writes all processors into one file, and prefers it when it reads
        image = processor.pop("image_processor", None)
        film, film_file = processor.pop("video_processor", None), f"{_WHOLE}: video_processor"
        if not isinstance(film, dict):
            film, film_file = _load(folder / _VIDEO), _VIDEO
        if isinstance(image, dict):
            file = f"{_WHOLE}: image_processor"
        else:
            image = _load(folder / file, required=True)
        model = Settings(_load(folder / "config.json", required=True), "config.json")
        tokenizer = _load(folder / "tokenizer_config.json")
        named = tokenizer.get("extra_special_tokens")
        tokens = {**tokenizer, **named} if isinstance(named, dict) else tokenizer
        return cls(
            model_type=model.read("model_type", str),
            image=Settings(image, file),
            processor=Settings(processor, _WHOLE),
            model=model,
            tokens=Settings(tokens, "tokenizer_config.json"),
            video=Settings(film, film_file),
        )


def _load(path: Path, *, required: bool = False) -> dict[str, Any]:
    hint = "copy it from the checkpoint"
    try:
        values = parse(path.read_text("utf-8"))
    except FileNotFoundError:
        if required:
            raise BrokenArtifactError(f"{path.parent} holds no {path.name}", hint=hint) from None
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenArtifactError(f"{path} cannot be read: {error}", hint=hint) from None
    if not isinstance(values, dict):
        raise BrokenArtifactError(f"{path} holds no JSON object", hint=hint)
    return values
