"""Loads and unloads the engines of a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from edgellm.device_runtime.api.generation_request import GenerationDefaults
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.device_runtime.transcription.drafts import NGRAM
from edgellm.device_runtime.transcription.transcriber import Transcriber
from edgellm.device_runtime.validation import MAX_STALL_MS
from edgellm.tools.serve.engines import kv_persistence
from edgellm.tools.serve.engines.models import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Load options that all engines of a server share."""

    spec: SpecOptions | None = None
    context_reuse: bool = True
    allow_special_tokens: bool = False
    verify: bool | None = None
    max_stall_ms: float = MAX_STALL_MS
    uses_model_defaults: bool = True  # for options that a request does not give
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)  # before the model's
    contexts: Path | None = None  # folder of `--slotSavePath`
    has_own_folders: bool = False  # one subfolder of `contexts` for each engine

    def load(self, model: Model) -> LLM | Transcriber:
        """Load an engine, and the contexts of a language model.

        Raises as `LLM` or `Transcriber`.
        """
        if model.is_speech:
            return Transcriber(model.folder, self._speech_draft(), verify=self.verify)
        llm = LLM(
            model.folder,
            verify=self.verify,
            spec=self.spec,
            multimodal_engine_dir=model.visual,
            audio_engine_dir=model.audio,
            context_reuse=self.context_reuse,
            allow_special_tokens=self.allow_special_tokens,
            max_stall_ms=self.max_stall_ms,
        )
        defaults = llm.defaults if self.uses_model_defaults else GenerationDefaults()
        llm.defaults = defaults.overridden(self.defaults)
        if self.contexts is not None:
            kv_persistence.restore(self._contexts_of(model), llm)
        return llm

    def _speech_draft(self) -> Path | str:
        """Draft of speech models, which draft by another model or by n-grams; "": none."""
        if self.spec is None:
            return ""
        by_ngrams = self.spec.network is None and NGRAM in self.spec.lookups
        return self.spec.draft_engine_dir or (NGRAM if by_ngrams else "")

    def unload(self, model: Model, engine: LLM | Transcriber) -> None:
        """Save an engine's contexts and free its memory.

        Raises:
            LimitError: the disk is full; the memory is freed nevertheless.
        """
        try:
            if self.contexts is not None and isinstance(engine, LLM):
                kv_persistence.save(self._contexts_of(model), engine)
        finally:
            engine.close()

    def prepare(self, models: Sequence[Model]) -> None:
        """Create the folders of the engines' contexts with `--slotSavePath`.

        Raises:
            EdgeLLMError: a folder is not writable, or context reuse is off.
        """
        for model in models if self.contexts is not None else ():
            kv_persistence.prepare(self._contexts_of(model), reuses=self.context_reuse)

    def _contexts_of(self, model: Model) -> kv_persistence.SnapshotFolder:
        assert self.contexts is not None
        own = quote(model.name, safe="") if self.has_own_folders else ""
        draft = self.spec.draft_engine_dir if self.spec is not None else None
        return kv_persistence.folder_of(self.contexts / own, model, draft)
