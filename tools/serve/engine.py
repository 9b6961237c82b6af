"""The engine behind the server: loading it, and starting the answer to one request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgellm.device_runtime.engine.llm import LLM, Answer
from edgellm.device_runtime.engine.prefix_cache import RecordedSession
from edgellm.device_runtime.sampling.sampler import SamplingParams
from edgellm.device_runtime.session import I64, Bool, PassResult, Session
from edgellm.device_runtime.speculate.options import SpecOptions


@dataclass(frozen=True, slots=True)
class Ask:
    """What one request wants from the engine."""

    prompt: str | list[dict[str, Any]]  # raw text, or messages for the chat template
    sampling: SamplingParams
    max_tokens: int | None = None  # None: as many as the cache has room for
    stop: tuple[str, ...] = ()
    images: tuple[str, ...] = ()  # paths or data: URIs, as the messages have placeholders
    template_flags: Mapping[str, Any] = field(default_factory=dict)


class InterruptibleSession(RecordedSession):
    """A session that asks before every pass whether it is still wanted."""

    def __init__(self, session: Session, check: Callable[[], None]) -> None:
        super().__init__(session)
        self._check = check

    def run(
        self,
        token_ids: I64,
        write_index: int,
        logits_index: I64,
        *,
        position_ids: I64 | None = None,
        tree_mask: Bool | None = None,
    ) -> PassResult:
        """See `Session.run`; raises what the check raises, with the cache as it was."""
        self._check()
        return super().run(
            token_ids, write_index, logits_index, position_ids=position_ids, tree_mask=tree_mask
        )


def load(
    engine_dir: Path,
    multimodal_engine_dir: Path | None,
    how: SpecOptions | None,
    *,
    context_reuse: bool,
    allow_special_tokens: bool = False,
    verify: bool | None,
) -> LLM:
    """The engine of a server; raises what `LLM` raises."""
    return LLM(
        engine_dir, verify=verify, spec=how, multimodal_engine_dir=multimodal_engine_dir,
        context_reuse=context_reuse, allow_special_tokens=allow_special_tokens,
    )  # fmt: skip


def start(llm: LLM, ask: Ask) -> Answer:
    """An answer that is not iterated over yet; images are encoded.

    Raises:
        RequestError: the template refuses the messages, an image cannot be read, nothing fits.
    """
    is_raw = isinstance(ask.prompt, str)
    if isinstance(ask.prompt, str):
        text = ask.prompt
    else:
        text = llm.formatter.format(ask.prompt, ask.template_flags)
    return llm.generate_text(
        text,
        images=ask.images,
        add_special_tokens=is_raw,
        sampling=ask.sampling,
        max_generate_length=ask.max_tokens or llm.manifest.max_kv_cache_capacity,
        stop=ask.stop,
    )
