"""Typed reader of a Hugging Face config that rejects unknown keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from edgellm.core.errors import UnsupportedModelError

T = TypeVar("T")
_REQUIRED: Any = object()
REMEDY = "use config.json as the model was published"
_MAX_LAYERS, _MAX_SIZE = 10_000, 2**31 - 1

# Keys for training, storage or defaults of other tools, not for the forward pass.
_HARMLESS = frozenset(
    [
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "bad_words_ids",
        "base_model_name_or_path",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "edgellm_rotation",
        "embd_pdrop",
        "embedding_dropout",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "is_llama_config",
        "is_local",
        "label2id",
        "max_new_tokens",
        "medusa_num_heads",
        "medusa_num_layers",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "quantization_config",
        "resid_pdrop",
        "residual_dropout",
        "return_dict",
        "sep_token_id",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "transformers.js_config",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    ]
)


def is_beyond(value: object) -> bool:
    """Whether it is infinite, NaN, or an integer beyond 64 bits."""
    return isinstance(value, (int, float)) and not -(2**63) <= value < 2**63


class ConfigReader:
    """Reads config values by key and type, and records the keys."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = dict(config)
        self._used: set[str] = set()

    def read(self, key: str, kind: type[T], default: T | None = _REQUIRED) -> T:
        """The value of `key`; null counts as absent.

        Raises:
            UnsupportedModelError: absent without a default, of another type, infinite, not a
                number, or beyond 64 bits.
        """
        self._used.add(key)
        value = self._config.get(key)
        if value is None:
            if default is _REQUIRED:
                raise UnsupportedModelError(f"config.json has no {key}", hint=REMEDY)
            return default  # type: ignore[return-value]  # T may itself be optional
        if is_beyond(value):
            raise UnsupportedModelError(
                f"config.json: {key} is no finite number of 64 bits", hint=REMEDY
            )
        if kind is float and isinstance(value, int):
            return float(value)  # type: ignore[return-value]  # T is float here
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UnsupportedModelError(
                f"config.json: {key} should be {kind.__name__}, found {value!r}", hint=REMEDY
            )
        return value

    def positive(self, key: str, default: int | None = _REQUIRED) -> int:
        """The value of `key`, an integer of at least 1 that a tensor or a network can have."""
        value = self.read(key, int, default)
        if value < 1:
            raise UnsupportedModelError(
                f"config.json: {key} = {value} is not positive", hint=REMEDY
            )
        if value > (_MAX_LAYERS if key.endswith("_layers") else _MAX_SIZE):
            raise UnsupportedModelError(
                f"config.json: {key} = {value} is too large for any model", hint=REMEDY
            )
        return value

    def nonzero(self, key: str, default: float) -> float:
        """The value of `key`, a number other than 0."""
        value = self.read(key, float, default)
        if value == 0:
            raise UnsupportedModelError(f"config.json: {key} = {value}", hint=REMEDY)
        return value

    def optional(self, key: str, kind: type[T]) -> T | None:
        """The value of `key`, None if absent or null."""
        return self.read(key, kind, None)

    def is_null(self, key: str) -> bool:
        """Whether the config has `key`, with the value null."""
        self._used.add(key)
        return key in self._config and self._config[key] is None

    def assume(self, **values: Any) -> None:
        """Set the architecture's defaults of missing keys."""
        for key, value in values.items():
            self._config.setdefault(key, value)

    def replace(self, **values: Any) -> None:
        """Replace values of keys that other keys determine."""
        self._config.update(values)

    def skip(self, *keys: str) -> None:
        """Ignore these keys: they do not affect the computation."""
        self._used.update(keys)

    def choice(self, key: str, *allowed: str) -> str:
        """The value of `key`, one of `allowed`; default: the first."""
        self.expect(key, *allowed)
        return str(self._config.get(key) or allowed[0])

    def expect(self, key: str, *allowed: object) -> None:
        """Accept `key` only if absent, null or one of `allowed`."""
        self._used.add(key)
        value = self._config.get(key)
        if value is not None and value not in allowed:
            choices = ", ".join(repr(item) for item in allowed) or "null"
            raise UnsupportedModelError(
                f"config.json: {key} = {value!r} is not supported (only {choices})"
            )

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        """Reject unread keys that are switched on."""
        left = set(self._config) - self._used - _HARMLESS - set(ignored)
        unknown = sorted(
            key
            for key in left
            if not key.startswith("_") and self._config[key] not in (None, False, [], {})
        )
        if unknown:
            raise UnsupportedModelError(
                f"config.json has keys that edgellm does not understand: {', '.join(unknown)}",
                hint=f"if they do not change the mathematics: --ignore_config_keys "
                f"{','.join(unknown)}",
            )
