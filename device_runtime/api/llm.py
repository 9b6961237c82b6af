"""The Python interface: `LLM(engine_dir).generate(...)` yields steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Sized
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from edgellm.core.checksums import FileCheck
from edgellm.core.errors import BrokenArtifactError, RequestError
from edgellm.core.manifest import LLM_ENGINE, Engine, load_engine
from edgellm.core.model_spec import DecoderSpec
from edgellm.device_runtime import validation
from edgellm.device_runtime.api.generation_request import (
    MAX_GENERATE_LENGTH,
    GenerationDefaults,
    GenerationRequest,
)
from edgellm.device_runtime.api.pooler import (
    Embedding,
    EmbeddingInput,
    Pooler,
    Ranked,
    RerankInput,
    open_pooler,
)
from edgellm.device_runtime.api.scoring import Reader, Text, TextPooler
from edgellm.device_runtime.arrays import ImageRows
from edgellm.device_runtime.engine import continuation
from edgellm.device_runtime.engine.chat_template import Formatter
from edgellm.device_runtime.engine.kv_cache_manager import KVCacheManager
from edgellm.device_runtime.engine.lora import open_adapters
from edgellm.device_runtime.engine.media.encoded import placed_prompt
from edgellm.device_runtime.engine.profile import IMAGES, Profile
from edgellm.device_runtime.engine.prompt import Prompt, fit, refuse_long
from edgellm.device_runtime.engine.sequence import Sequence, Step
from edgellm.device_runtime.engine.stop_detector import StopDetector
from edgellm.device_runtime.engine.template_flags import GENERATE, refuse_flags, require_known
from edgellm.device_runtime.networks.decoder import DecoderNetwork, open_decoder
from edgellm.device_runtime.prefix_cache.pinned_prefixes import count_common
from edgellm.device_runtime.sampling.guidance import Guidance
from edgellm.device_runtime.sampling.logprobs import TokenLogprobs
from edgellm.device_runtime.sampling.params import Channels, SamplingParams, Thinking
from edgellm.device_runtime.sampling.sampler import Sampler
from edgellm.device_runtime.scheduler.background_loop import BackgroundLoop
from edgellm.device_runtime.scheduler.concurrent import BatchError, NewOutputs, together
from edgellm.device_runtime.scheduler.request_output import RequestOutput
from edgellm.device_runtime.scheduler.running_batch import Batch, RunningRequest
from edgellm.device_runtime.scheduler.scheduler_limits import bounds_of
from edgellm.device_runtime.scheduler.step_lock import StepLock
from edgellm.device_runtime.speculate.open_drafter import Drafters, resolve_auto
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.device_runtime.text import reasoning_marks
from edgellm.device_runtime.text.tokenizer import ChatTokenizer, StopMatcher
from edgellm.multimodal.media import Audio

if TYPE_CHECKING:
    from edgellm.device_runtime.engine.images import EncodedImages, ImageReader
    from edgellm.device_runtime.engine.media.audio import AudioReader
    from edgellm.device_runtime.engine.media.encoded import EncodedItem
    from edgellm.multimodal.media import Source

__all__ = ["LLM", "BatchError", "RequestOutput", "Step"]
BeforePass = Callable[[], object]


class LLM:
    """A loaded engine with its tokenizer; `close` or `with` frees its memory.

    Threads may share it: requests run concurrently, up to its batch size, see `StepLock`.

    Attributes:
        defaults: for options that a request does not give; the model's, unless replaced.
    """

    _kv_cache_manager: KVCacheManager | None  # None: closed

    def __init__(
        self,
        engine_dir: Path | str,
        *,
        verify: bool | None = None,
        spec: SpecOptions | None = None,
        multimodal_engine_dir: Path | str | None = None,
        audio_engine_dir: Path | str | None = None,
        context_reuse: bool = False,
        allow_special_tokens: bool = False,
        max_stall_ms: float = validation.MAX_STALL_MS,
    ) -> None:
        """Load an engine.

        Args:
            engine_dir: a folder made by llm_build on this machine.
            verify: True checks the hash of every file, False only sizes; None checks the hashes
                of files that changed since the last check.
            spec: decode speculatively; None decodes plainly.
            multimodal_engine_dir: a folder made by visual_build, for prompts with images.
            audio_engine_dir: a folder made by audio_build, for prompts with audio.
            context_reuse: reuse the KV cache of shared prefixes; last bits may change.
            allow_special_tokens: parse special tokens that are spelled out in messages.
            max_stall_ms: limit of a pass with a prefill chunk while other requests decode.

        Raises:
            BrokenArtifactError: files are damaged, or built for another machine or library version.
            LimitError: `spec` exceeds what the engine was built for.
            RequestError: an argument of the wrong kind.
        """
        encoders = {
            "multimodal_engine_dir": multimodal_engine_dir,
            "audio_engine_dir": audio_engine_dir,
        }
        _check_loading(
            engine_dir, verify, spec, encoders, max_stall_ms,
            context_reuse=context_reuse, allow_special_tokens=allow_special_tokens,
        )  # fmt: skip
        folder = Path(engine_dir)
        self.manifest = load_engine(folder, LLM_ENGINE)
        self.defaults = _defaults(self.manifest)
        with FileCheck(folder, self.manifest.files, verify):
            self.tokenizer, self._pooler = ChatTokenizer(folder), open_pooler(folder, self.manifest)
            base = open_decoder(folder, self.manifest)
        self.formatter = Formatter(self.tokenizer, allow_special_tokens)
        self._drafters: Drafters | None = None
        if spec is not None and (how := resolve_auto(spec, folder, self.manifest)) is not None:
            self._drafters = Drafters(
                engine=folder, base=self.manifest, network=base, options=how, verify=verify
            )
        manager = self._new_manager(base, reuses_context=context_reuse)
        self._kv_cache_manager: KVCacheManager | None = manager
        tree_rows = self.manifest.max_verify_tree_size if self._drafters is not None else 1
        bounds = bounds_of(self.manifest, manager, max_stall_ms, self.batch_size, tree_rows)
        self._turns = StepLock(Batch(manager, bounds))
        self._texts = TextPooler(self._turns, self.manifest)
        self._adapters = open_adapters(folder, self.manifest, base, self._turns.visiting)
        self._open_encoders(multimodal_engine_dir, audio_engine_dir, verify)
        self._guidance = _guidance(folder, self.manifest)

    def _new_manager(self, base: DecoderNetwork, *, reuses_context: bool) -> KVCacheManager:
        return KVCacheManager(
            base=base,
            prefill_rows=self.manifest.prefill_rows,
            drafts=self._drafters.caches if self._drafters else (),
            no_images=_no_images(self.manifest.decoder),
            reuses_context=reuses_context,
        )

    def _open_encoders(
        self, visual: Path | str | None, audio: Path | str | None, verify: bool | None
    ) -> None:
        self.images: ImageReader | None = None
        self.audio: AudioReader | None = None
        if visual is not None:
            self._open_images(Path(visual), verify)
        if audio is not None:
            self._open_audio(Path(audio), verify)

    def _open_images(self, folder: Path, verify: bool | None) -> None:
        from edgellm.device_runtime.engine.images import open_images  # imports Pillow

        self.images = open_images(folder, self.manifest, verify=verify)
        self.formatter = replace(self.formatter, film_text=self.images.film_text)

    def _open_audio(self, folder: Path, verify: bool | None) -> None:
        from edgellm.device_runtime.engine.media import audio

        ids = audio.require_audio_decoder(self.manifest)
        texts = audio.AudioTexts(*map(self.tokenizer.token_name, ids))
        self.audio = audio.AudioReader(
            folder=folder, base=self.manifest, texts=texts, verify=verify
        )

    @property
    def batch_size(self) -> int:
        """Maximum requests that share a pass, from the engine."""
        return self.manifest.max_batch_size

    def on_pass(self, callback: Callable[[int, int], object]) -> None:
        """Call `callback` before passes with batch size and number of preempted requests."""
        self._turns.on_pass(callback)

    @property
    def kv_cache_manager(self) -> KVCacheManager:
        """The KV cache manager; raises `EdgeLLMError` after `close`."""
        self._turns.require_open()
        assert self._kv_cache_manager is not None
        return self._kv_cache_manager

    @property
    def base(self) -> DecoderNetwork:
        """The base; raises as `kv_cache_manager`."""
        return self.kv_cache_manager.base

    @base.setter
    def base(self, base: DecoderNetwork) -> None:
        self.kv_cache_manager.base = base

    def __enter__(self) -> LLM:
        """`with LLM(...) as llm:` closes it at the end."""
        self._turns.require_open()
        return self

    def __exit__(self, *_: object) -> None:
        """See `close`."""
        self.close()

    def close(self) -> None:
        """Free the memory after the running pass; unfinished requests fail."""
        self._turns.close()
        self._adapters.close()
        self._kv_cache_manager = self._drafters = self.images = self.audio = None

    @property
    def adapters(self) -> dict[str, Path]:
        """Folders of the loaded LoRA adapters, by name."""
        return self._adapters.folders

    def load_adapter(self, name: str, folder: Path | str) -> None:
        """Load a LoRA adapter, for requests with `lora=name`.

        Other requests continue, and wait for one pass at most.

        Args:
            name: a new one, or the name of the same weights.
            folder: as PEFT saves adapters.

        Raises:
            EdgeLLMError: the engine takes none, or not this one; nothing has changed.
        """
        validation.require_kind("name", name, str, "a text")
        validation.require_kind("folder", folder, (str, os.PathLike), "a path")
        self._turns.require_open()
        self._adapters.load(name, Path(folder).expanduser())

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; raises `RequestError` if it is unknown or in use."""
        self._turns.require_open()
        self._adapters.unload(name, self._turns.count_using)

    def sampling_params(self, **given: Any) -> SamplingParams:
        """The model's sampling parameters, with the given ones in their place.

        Raises:
            RequestError: an unknown name, or a value out of range.
        """
        try:
            return self.defaults.params(given)
        except TypeError as error:
            raise RequestError(f"sampling_params: {error}") from None

    def generate(
        self,
        prompt: str | list[dict[str, Any]],
        *,
        sampling: SamplingParams | None = None,
        max_generate_length: int | None = None,
        stop: Sized[str] = (),
        speculative: bool = True,
        priority: int = 0,
        lora: str | None = None,
        **template_flags: Any,
    ) -> RequestOutput:
        """Create a request; computation starts when it is iterated over.

        Args:
            prompt: raw text, or chat messages for the model's template, whose content may be a
                list of {"type": "text", "text": ...} and {"type": "image", "image": path or URI},
                or {"type": "video", "video": path, URI, or list of frames}, or
                {"type": "audio", "audio": path or URI}.
            sampling: how tokens are chosen; None uses the model's defaults, see `sampling_params`.
            max_generate_length: maximum number of tokens; None: the model's default, else 256.
            stop: strings that end the output and are not part of it.
            speculative: False decodes plainly although `spec` was given.
            priority: smaller is scheduled first.
            lora: name of a loaded adapter for this request.
            template_flags: variables of the chat template, see `Formatter.format`; a last message
                of the assistant is continued unless continue_final_message is False.

        Raises:
            RequestError: the template rejects the messages or does not use a variable, or the
                prompt is too long.
        """
        images: list[Source] = []
        if isinstance(prompt, str):
            text, is_raw, continues = prompt, True, False
            refuse_flags(template_flags)
        else:
            images = validation.media_sources(prompt)
            text, is_raw = self.formatter.format(prompt, template_flags), False
            continues = continuation.goes_on(prompt, template_flags)
        return self.generate_text(
            GenerationRequest(
                text=text,
                images=images,
                add_special_tokens=is_raw,
                continues=continues,
                sampling=self.sampling_params() if sampling is None else sampling,
                max_generate_length=max_generate_length,
                stop=stop,
                speculative=speculative,
                priority=priority,
                lora=lora,
            )
        )

    def generate_batch(
        self,
        prompts: Sized[str | list[dict[str, Any]]],
        *,
        sampling: SamplingParams | Sized[SamplingParams] | None = None,
        batch_size: int | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Complete the outputs of prompts, in their order, in batches.

        Args:
            prompts: as for `generate`.
            sampling: for all, or one for each.
            batch_size: maximum concurrent requests; None: the engine's batch size.
            options: of `generate`.

        Raises:
            RequestError: a prompt is too long, or options are unknown to `generate`.
            BatchError: requests failed; it holds the other outputs, which are complete.
        """
        found = validation.batch(prompts, sampling)
        if not found:  # else `generate` checks them
            flags = {name: value for name, value in options.items() if name not in GENERATE}
            require_known(flags, self.tokenizer)
        answers = [self.generate(prompt, sampling=how, **options) for prompt, how in found]
        for _ in self.together(answers, batch_size):
            pass
        if any(answer.failure is not None for answer in answers):
            raise BatchError(answers)
        return answers

    def driver(self) -> BackgroundLoop:
        """A background loop that computes for many threads."""
        return BackgroundLoop(self._turns)

    def together(
        self, answers: Iterable[RequestOutput], batch_size: int | None = None
    ) -> Iterator[NewOutputs]:
        """Iterate over the outputs of concurrent requests, see `concurrent.together`.

        A failed request has its `failure` set, and the others continue.

        Args:
            answers: of `generate`, not iterated over yet; taken as soon as there is space.
            batch_size: maximum concurrent requests; None: the engine's batch size.
        """
        if batch_size is None:
            batch_size = self.batch_size
        return together(self._turns, answers, validation.require_length("batch_size", batch_size))

    def generate_text(self, request: GenerationRequest) -> RequestOutput:
        """As `generate`, for a formatted text or its token ids; images are encoded at once."""
        self._turns.require_open()
        self._require_logits()
        sampling, stops, max_tokens = self._checked(request)
        stop_tokens = self._stop_tokens(request)
        ids = (*sampling.stop_token_ids, *stop_tokens)
        sampling = replace(sampling, stop_token_ids=ids) if stop_tokens else sampling
        profile, has_marks = Profile(), request.add_special_tokens
        adapter = None if request.lora is None else self._adapters.find(request.lora)
        prompt = self._prompt(request.text, request.images, profile, add_special_tokens=has_marks)
        prompt = replace(prompt, adapter=adapter)
        max_tokens, warnings = fit(len(prompt.token_ids), max_tokens, self.manifest)
        if request.max_generate_length is None and self.defaults.max_generate_length:
            warnings = []  # the model's limit may exceed the engine's
        for reader in (self.images, self.audio):
            if request.images and reader is not None:
                warnings = [*warnings, *reader.warnings]
        sampler = self.sampler(self._thinking_first(sampling, request), prompt)
        # Continued messages and raw prompts continue as text, with the space before a word.
        before = prompt.token_ids if has_marks or request.continues else ()
        endings = StopDetector(
            stream=self.tokenizer.stream(request.shown_tokens, before),
            stops=stops,
            ends=sampler.ends,
            min_tokens=sampling.min_tokens,
            stop_tokens=stop_tokens,
        )
        sequence = Sequence(
            prompt=prompt,
            sampler=sampler,
            max_tokens=max_tokens,
            profile=profile,
            endings=endings,
            warnings=warnings,
        )
        if request.speculative and self._drafters is not None:
            sequence.drafter = self._drafters.start(greedy=sampling.is_greedy)
            sequence.accept = self._drafters.options.accept
        kept = None
        if request.system_prompt is not None:
            ids = self.tokenizer.encode(request.system_prompt, add_special_tokens=has_marks)
            kept = count_common(ids, prompt.token_ids)
            sequence.marks = (kept,)
        running = RunningRequest(sequence=sequence, kept=kept, priority=request.priority)
        return RequestOutput(running, self._turns)

    def _checked(self, request: GenerationRequest) -> tuple[SamplingParams, StopMatcher, int]:
        """Sampling, stop strings and maximum tokens of a request; raises `RequestError`."""
        sampling = request.sampling
        validation.require_kind("sampling", sampling, SamplingParams, "a SamplingParams")
        validation.require_kind("speculative", request.speculative, bool, "True or False")
        validation.require_kind("priority", request.priority, int, "a whole number")
        stops = StopMatcher(validation.text_list("stop", request.stop))
        length = request.max_generate_length
        if length is None:
            length = self.defaults.max_generate_length or MAX_GENERATE_LENGTH
        length = validation.require_length("max_generate_length", length)
        sampling.require_fit(self.manifest.decoder.vocab_size, length)
        return sampling.seeded(), stops, length

    def read_logprobs(
        self,
        token_ids: Sized[int],
        num_top: int = 0,
        before_pass: BeforePass = lambda: None,
        lora: str | None = None,
    ) -> list[TokenLogprobs]:
        """Log-probabilities of all tokens of a text but the first, before sampling options.

        Args:
            token_ids: of the text.
            num_top: number of likeliest tokens at each position to include.
            before_pass: called before every pass; an exception ends the computation.
            lora: see `generate`.

        Raises:
            RequestError: the text is empty or too long.
        """
        self._require_logits()
        ids = self._ids(token_ids, add_special_tokens=False)
        fit(len(ids), 0, self.manifest)
        return self._reader(before_pass, lora).logprobs(ids, num_top)

    def embed(
        self,
        text: str | Sized[int] | Sized[str],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate: bool = False,
        lora: str | None = None,
    ) -> NDArray[np.float32]:
        """Embedding of a text, float32 [D]; of a list of texts [N, D].

        Args:
            text: a text, its token ids, or a list of texts.
            dimensions: first elements that are kept (Matryoshka); None: all of the model's.
            prompt_name: name of one of the model's prompts; None: its default, or no prompt.
            prompt: text before the input, in place of the model's prompts.
            truncate: cut texts that are too long.
            lora: see `generate`.

        Raises:
            RequestError: the engine does not embed, the text is empty or too long, or an option is
                unknown.
        """
        options: dict[str, Any] = {
            "dimensions": dimensions,
            "prompt_name": prompt_name,
            "prompt": prompt,
            "truncate": truncate,
            "lora": lora,
        }
        if isinstance(text, str) or not (len(text) and isinstance(text[0], str)):
            one = cast("str | Sized[int]", text)
            return self.embed_input(EmbeddingInput(text=one, **options)).vector
        inputs = [EmbeddingInput(text=each, **options) for each in cast("Sized[str]", text)]
        return np.stack([each.vector for each in self.embed_inputs(inputs)])

    def rerank(
        self,
        query: str,
        documents: Sized[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate: bool = True,
        lora: str | None = None,
    ) -> list[Ranked]:
        """Documents by their score for a query, best first.

        The score of an embedding model is the cosine of both embeddings, with the model's prompts
        for queries and documents.

        Args:
            query: a text.
            documents: texts.
            top_n: number of the best documents to return; None: all.
            instruction: task in the prompt of a reranker; None: the model's.
            truncate: cut documents that are too long.
            lora: see `generate`.

        Raises:
            RequestError: the engine neither scores nor embeds, or a text is too long.
        """
        wanted = RerankInput(
            query=query, document="", instruction=instruction, truncate=truncate, lora=lora
        )
        return self.rank(wanted, documents)[0][:top_n]

    def rank(
        self, wanted: RerankInput, documents: Sized[str]
    ) -> tuple[list[Ranked], list[Embedding]]:
        """All documents, best first, and the outputs of the engine; see `rerank`."""
        inputs = self.pooler.rank_inputs(wanted, documents)
        outputs = self.embed_inputs(inputs)
        return self.pooler.ranked([each.vector for each in outputs]), outputs

    def embed_input(
        self, wanted: EmbeddingInput | RerankInput, before_pass: BeforePass = lambda: None
    ) -> Embedding:
        """Embedding of one input, or its score; see `embed`, `rerank` and `read_logprobs`."""
        return self.embed_inputs([wanted], before_pass)[0]

    def embed_inputs(
        self,
        wanted: Sized[EmbeddingInput] | Sized[RerankInput] | Sized[EmbeddingInput | RerankInput],
        before_pass: BeforePass = lambda: None,
    ) -> list[Embedding]:
        """As `embed_input`, for several; short ones share passes, also with those of other threads.

        All inputs are checked before the first is computed.
        """
        pooler, texts = self.pooler, list[Text]()
        sizes = [each.dimensions if isinstance(each, EmbeddingInput) else None for each in wanted]
        for each, dimensions in zip(wanted, sizes, strict=True):
            pooler.require_dimensions(dimensions)
            ids, first = pooler.tokens(each, self.tokenizer)
            adapter = None if each.lora is None else self._adapters.find(each.lora)
            texts.append(Text(token_ids=ids, first=first, adapter=adapter, before_pass=before_pass))
        found = self._texts.pool(texts, self.kv_cache_manager)
        return [
            Embedding(pooler.vector(pooled, dimensions), len(text.token_ids))
            for pooled, dimensions, text in zip(found, sizes, texts, strict=True)
        ]

    @property
    def embeds(self) -> bool:
        """Whether the engine embeds texts, or ranks documents."""
        return self._pooler is not None

    @property
    def pooler(self) -> Pooler:
        """The pooler of an engine that embeds; raises `RequestError` for others."""
        if self._pooler is None:
            raise RequestError(
                "this engine answers and does not embed",
                hint="export a model for embeddings with --pooling last or mean",
            )
        return self._pooler

    def _reader(self, before_pass: BeforePass, lora: str | None = None) -> Reader:
        adapter = None if lora is None else self._adapters.find(lora)
        return Reader(
            kv_cache_manager=self.kv_cache_manager,
            step_lock=self._turns,
            before_pass=before_pass,
            adapter=adapter,
            is_whole=not self.manifest.decoder.is_causal,
        )

    def _require_logits(self) -> None:
        """Raise `RequestError` for an encoder."""
        if not self.manifest.decoder.is_causal:
            raise RequestError(
                f"this engine is an encoder ({self.manifest.decoder.model_type}) and generates no "
                "text",
                hint="use it for embeddings or to rank documents",
            )

    def _prompt(
        self,
        text: str | Sized[int],
        sources: Sized[Source],
        profile: Profile,
        *,
        add_special_tokens: bool,
    ) -> Prompt:
        images, audio = self.images, self.audio
        self.require_readers(sources)
        if images is None and audio is None:
            return Prompt(self._ids(text, add_special_tokens=add_special_tokens))
        seen: list[EncodedImages] = []
        heard: list[EncodedItem] = []
        clips = [each for each in sources if isinstance(each, Audio)]
        pictures = [each for each in sources if not isinstance(each, Audio)]
        with self._turns.visiting() if sources else nullcontext(), profile.stage(IMAGES):
            if images is not None and pictures:
                seen = images.see(pictures, Path.cwd())
            if audio is not None and clips:
                heard = audio.hear(clips, Path.cwd())
        profile.image_tokens += [one.prepared.num_tokens for one in seen]
        if images is not None and isinstance(text, str):
            text = images.expand(text, seen)
        if audio is not None and isinstance(text, str):
            text = audio.expand(text, heard)
        ids = self._ids(text, add_special_tokens=add_special_tokens)
        return placed_prompt(
            ids,
            self.manifest.decoder,
            images=seen,
            clips=heard,
            placing=None if images is None else images.placing,
        )

    def require_readers(self, sources: Sized[Source]) -> None:
        """Check that the engines of the encoders for images, videos and audio are loaded.

        Raises:
            RequestError: one is not, or the model has none.
        """
        model, is_text = self.manifest.decoder.images, self.images is None and self.audio is None
        for is_audio, reader, flag, kind in (
            (False, self.images, "--multimodalEngineDir", "images"),
            (True, self.audio, "--audioEngineDir", "audio"),
        ):
            if reader is None and any(isinstance(each, Audio) is is_audio for each in sources):
                token = model and (model.audio_token_id if is_audio else model.token_id)
                raise RequestError(
                    f"the engine takes {'text only' if is_text else f'no {kind}'}",
                    hint=f"give the engine of the model's encoder of {kind} as {flag}"
                    if token is not None
                    else f"give an engine of a model with an encoder of {kind}, and its {flag}",
                )

    def _stop_tokens(self, request: GenerationRequest) -> dict[int, str]:
        """Stop strings that are special tokens, by id: the output's text does not contain them."""
        if not request.stop:
            return {}
        hidden = self.tokenizer.hidden_ids(request.shown_tokens)
        found = self.tokenizer.added_ids(validation.text_list("stop", request.stop))
        return {token_id: text for text, token_id in found.items() if token_id in hidden}

    def _bad_words(self, words: Sized[str]) -> list[list[int]]:
        """Token ids of words, at the beginning of a text and after a space."""
        texts = [before + word.strip() for word in words for before in ("", " ")]
        found = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return [list(each) for each in dict.fromkeys(map(tuple, found))]

    def _ids(self, text: str | Sized[int], *, add_special_tokens: bool) -> list[int]:
        if isinstance(text, str):
            refuse_long(text, self.tokenizer, self.manifest)
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if unknown := [i for i in text if not 0 <= i < self.manifest.decoder.vocab_size]:
            raise RequestError(f"the model has no token {unknown[0]}")
        return list(text)

    def sampler(self, sampling: SamplingParams, prompt: Prompt) -> Sampler:
        """The sampler of a request; raises as `Guidance.start`."""
        guide = sampling.guide
        constraint = self._guidance.start(guide) if guide is not None else None
        return Sampler(
            params=sampling,
            prompt=prompt.token_ids,
            constraint=constraint,
            eos_token_ids=self.manifest.eos_token_ids,
            bad_words=self._bad_words(sampling.bad_words),
        )

    def _thinking_first(
        self, sampling: SamplingParams, request: GenerationRequest
    ) -> SamplingParams:
        """The sampling parameters, with a guide that begins after the model's reasoning."""
        text, guide = request.text, sampling.guide
        if guide is None or request.add_special_tokens or not isinstance(text, str):
            return sampling
        thinking = self._thinking(text, continues=request.continues)
        return replace(sampling, guide=replace(guide, thinking=thinking))

    def _thinking(self, text: str, *, continues: bool) -> Thinking | Channels | None:
        """The reasoning after a formatted text; None: there is none."""
        template, marks = self.tokenizer.chat_template or "", self.tokenizer.added_ids
        if reasoning_marks.has_channels(template):
            is_new = not continues and reasoning_marks.begins_message(text)
            found = (*marks(reasoning_marks.CHANNEL_MARKS).items(),)
            return Channels(ids=found) if is_new else None
        form = reasoning_marks.find(template)
        if form is None:
            return None
        is_inside = reasoning_marks.opened(form, text, continues=continues)
        if is_inside is None:
            return None
        return Thinking(
            opening=form.opening,
            closing=form.closing,
            is_inside=is_inside,
            ids=(*marks(form.shown).items(),),
        )


def _defaults(manifest: Engine) -> GenerationDefaults:
    try:
        return GenerationDefaults.of(manifest.generation_defaults)
    except RequestError as error:
        raise BrokenArtifactError(
            f"the engine's manifest is damaged: generation_defaults: {error}",
            hint=f"run {manifest.builder} again",
        ) from None


def _guidance(folder: Path, manifest: Engine) -> Guidance:
    return Guidance(folder, manifest.decoder.vocab_size, manifest.eos_token_ids)


def _no_images(decoder: DecoderSpec) -> ImageRows | None:
    """Image embeddings [0, H] of a text prompt; None for a decoder without images."""
    if decoder.images is None:
        return None
    return ImageRows.none(decoder.hidden_size, decoder.images.num_deepstack)


def _check_loading(
    engine_dir: Any,
    verify: Any,
    spec: Any,
    encoders: dict[str, Any],
    max_stall_ms: Any,
    **switches: Any,
) -> None:
    """Check the arguments of `LLM`; `encoders` are paths by name, `switches` booleans.

    Raises:
        RequestError: one is of another type, or out of range.
    """
    none, path = type(None), (str, os.PathLike)
    validation.require_kind("engine_dir", engine_dir, path, "a path")
    for name, folder in encoders.items():
        validation.require_kind(name, folder, (*path, none), "a path")
    validation.require_kind("verify", verify, (bool, none), "True, False or None")
    validation.require_kind("spec", spec, (SpecOptions, none), "a SpecOptions")
    if not validation.is_number(max_stall_ms) or not max_stall_ms > 0:
        raise RequestError(f"max_stall_ms {max_stall_ms!r} is not a number above 0")
    for name, switch in switches.items():
        validation.require_kind(name, switch, bool, "True or False")
