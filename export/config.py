"""Typed reading of a Hugging Face config: every key is understood, or the export stops."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from edgellm.contract import UnsupportedModelError
from edgellm.export.rope import Rope

T = TypeVar("T")
_REQUIRED: Any = object()

# Keys that describe training, storage or defaults of other tools, never the forward computation.
_HARMLESS = frozenset(
    """architectures attention_dropout attn_implementation
    auto_map bad_words_ids bos_token_id chunk_size_feed_forward dtype eos_token_id finetuning_task
    id2label initializer_range is_decoder is_encoder_decoder is_llama_config is_local label2id
    max_new_tokens model_type output_attentions output_hidden_states pad_token_id pretraining_tp
    problem_type quantization_config return_dict sep_token_id task_specific_params tokenizer_class torch_dtype
    torchscript transformers_version transformers.js_config unk_token_id unsloth_fixed unsloth_version
    use_cache""".split()
)


class ConfigReader:
    """Hands out config values by key and type, and remembers which keys were asked for."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._used: set[str] = set()

    def read(self, key: str, kind: type[T], default: T | None = _REQUIRED) -> T:
        """The value of `key`; null counts as absent.

        Raises:
            UnsupportedModelError: absent without a default, or of another type.
        """
        self._used.add(key)
        value = self._config.get(key)
        if value is None:
            if default is _REQUIRED:
                raise UnsupportedModelError(f"config.json has no {key}")
            return default  # type: ignore[return-value]  # T may itself be optional
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UnsupportedModelError(
                f"config.json: {key} should be {kind.__name__}, found {value!r}"
            )
        return value

    def optional(self, key: str, kind: type[T]) -> T | None:
        """The value of `key`, None when absent or null."""
        return self.read(key, kind, None)

    def expect(self, key: str, *allowed: object) -> None:
        """Accept `key` only when it is absent, null or one of `allowed`."""
        self._used.add(key)
        value = self._config.get(key)
        if value is not None and value not in allowed:
            choices = ", ".join(repr(item) for item in allowed)
            raise UnsupportedModelError(
                f"config.json: {key} = {value!r} is not supported (only {choices})"
            )

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        """Stop at keys that nobody asked for and that are switched on."""
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


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What the decoder family of Llama, Mistral and Qwen needs to know of itself."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Rope
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_proj_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None

    @classmethod
    def read(cls, reader: ConfigReader, **traits: Any) -> DecoderConfig:
        """Read the keys that the whole family shares; `traits` are the architecture's own."""
        heads = reader.read("num_attention_heads", int)
        hidden = reader.read("hidden_size", int)
        head_dim = reader.read("head_dim", int, hidden // heads)
        max_positions = reader.read("max_position_embeddings", int)
        reader.expect("hidden_act", "silu", "swish")
        config = cls(
            vocab_size=reader.read("vocab_size", int),
            hidden_size=hidden,
            intermediate_size=reader.read("intermediate_size", int),
            num_hidden_layers=reader.read("num_hidden_layers", int),
            num_attention_heads=heads,
            num_key_value_heads=reader.read("num_key_value_heads", int, heads),
            head_dim=head_dim,
            rms_norm_eps=reader.read("rms_norm_eps", float),
            max_position_embeddings=max_positions,
            rope=Rope.read(reader, head_dim, max_positions),
            tie_word_embeddings=reader.read("tie_word_embeddings", bool, False),
            **traits,
        )
        if heads % config.num_key_value_heads:
            raise UnsupportedModelError(
                f"config.json: {heads} attention heads cannot share "
                f"{config.num_key_value_heads} key/value heads"
            )
        return config


def nearest(name: str, known: list[str]) -> str:
    """A hint that names the most similar known word and lists the others."""
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
    suggestion = f"nearest supported: {match[0]}; " if match else ""
    return f"{suggestion}supported: {', '.join(sorted(known))}"
