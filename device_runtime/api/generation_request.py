"""A request whose text is formatted, as `LLM`, files and servers hand it to the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgellm.core.errors import RequestError, suggestion
from edgellm.device_runtime.sampling.params import OPTIONS, SamplingParams
from edgellm.device_runtime.validation import require_length
from edgellm.multimodal.media import Source

MAX_LENGTH = "max_generate_length"
MAX_GENERATE_LENGTH = 256  # if the request, the command and the model give none
_LENGTH_NAMES = (MAX_LENGTH, "max_new_tokens", "max_tokens")  # the last two are others' names


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request.

    Attributes:
        text: formatted text, or its token ids.
        images: images, videos and audio of the text, in order.
        add_special_tokens: the tokenizer adds its special tokens; the text is raw.
        continues: the output continues the last message of the text.
        sampling: how tokens are chosen.
        max_generate_length: maximum number of tokens; None: the default, as the KV cache has space.
        stop: strings that end the output and are not part of it.
        speculative: False decodes plainly although the engine has a drafter.
        system_prompt: a prefix of the text that is pinned for later requests.
        shown_tokens: special tokens that the output's text contains.
        priority: smaller is scheduled first.
        lora: name of a loaded adapter.
    """

    text: str | Sequence[int]
    images: Sequence[Source] = ()
    add_special_tokens: bool
    continues: bool = False
    sampling: SamplingParams
    max_generate_length: int | None
    stop: Sequence[str]
    speculative: bool = True
    system_prompt: str | None = None
    shown_tokens: Sequence[str] = ()
    priority: int = 0
    lora: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Values of options that a request does not give: the model's, or those of a command's flags.

    A protocol has defaults of its own for options that neither gives.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)  # by names in `OPTIONS`
    max_generate_length: int | None = None

    def __post_init__(self) -> None:
        """Reject unknown options and invalid values; raises `RequestError`."""
        for name, value in self.sampling.items():
            if name not in OPTIONS:
                raise _unknown(name)
            OPTIONS[name].check(value)
        if self.max_generate_length is not None:
            require_length(MAX_LENGTH, self.max_generate_length)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> GenerationDefaults:
        """Defaults by name, as manifests and JSON of users have them; None is no default.

        Raises:
            RequestError: an unknown option, or an invalid value.
        """
        given = {name: value for name, value in values.items() if value is not None}
        lengths = [given.pop(name) for name in _LENGTH_NAMES if name in given]
        return cls(sampling=given, max_generate_length=lengths[0] if lengths else None)

    def overridden(self, other: GenerationDefaults) -> GenerationDefaults:
        """The defaults of `other`, and these where it has none."""
        return GenerationDefaults(
            sampling={**self.sampling, **other.sampling},
            max_generate_length=other.max_generate_length or self.max_generate_length,
        )

    def params(
        self, given: Mapping[str, Any], own: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """Sampling parameters of a request.

        Args:
            given: values of the request.
            own: values of the protocol for options that neither the request nor these defaults
                give; None: those of `SamplingParams`.

        Raises:
            RequestError: a value is invalid.
        """
        return SamplingParams(**{**(own or {}), **self.sampling, **given}).seeded()


def _unknown(name: str) -> RequestError:
    known = [*OPTIONS, *_LENGTH_NAMES]
    words = (suggestion(name, known), f"options: {', '.join(known)}")
    return RequestError(
        f"{name!r:.80} is not an option of generation", hint=" ".join(filter(None, words))
    )
