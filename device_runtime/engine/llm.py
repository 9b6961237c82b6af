"""The Python interface: `LLM(engine_dir).generate(...)` yields steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm.contract import EngineManifest, RequestError, load_manifest
from edgellm.device_runtime import runners
from edgellm.device_runtime.engine import arguments
from edgellm.device_runtime.engine.answer import Answer, Step
from edgellm.device_runtime.engine.generate import generate
from edgellm.device_runtime.engine.messages import Formatter
from edgellm.device_runtime.engine.prefix_cache import (
    KeptContexts,
    RecordedSession,
    RowCache,
    count_common,
)
from edgellm.device_runtime.engine.profile import IMAGES, RESTORE, Profile, RoundCounts
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.device_runtime.engine.turns import Turns
from edgellm.device_runtime.sampling.guidance import Guidance
from edgellm.device_runtime.sampling.sampler import Sampler, SamplingParams
from edgellm.device_runtime.session import ImageRows
from edgellm.device_runtime.speculate.loop import Round, speculate
from edgellm.device_runtime.speculate.open_drafter import Drafters, settled
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.device_runtime.tokenizer import ChatTokenizer, StopMatcher, TextStream
from edgellm.integrity import FileCheck

if TYPE_CHECKING:
    from edgellm.device_runtime.engine.images import ImageReader, Seen

__all__ = ["LLM", "Answer", "Step"]


class LLM:
    """A loaded engine with its tokenizer; `close` or `with` gives its memory back.

    Threads may share it: answers are computed one after the other, see `Turns`.
    """

    def __init__(
        self,
        engine_dir: Path | str,
        *,
        verify: bool | None = None,
        spec: SpecOptions | None = None,
        multimodal_engine_dir: Path | str | None = None,
        context_reuse: bool = False,
        allow_special_tokens: bool = False,
    ) -> None:
        """Load an engine.

        Args:
            engine_dir: a folder made by llm_build on this machine.
            verify: True checks the hash of every file, False only sizes; None checks the hashes
                unless this was done since the files were last changed.
            spec: decode speculatively; None decodes plainly.
            multimodal_engine_dir: a folder made by visual_build, for prompts with images.
            context_reuse: do not compute again what a prompt has in common with the prompt before
                it and its answer; this may move last bits, as reading in other pieces does.
            allow_special_tokens: words of messages that read like special tokens are such.

        Raises:
            BrokenArtifactError: damaged, or built for another machine or library version.
            LimitError: `spec` exceeds what the engine was built for.
            RequestError: an argument of the wrong kind.
        """
        arguments.check_loading(
            engine_dir, verify, spec, multimodal_engine_dir,
            context_reuse=context_reuse, allow_special_tokens=allow_special_tokens,
        )  # fmt: skip
        folder = Path(engine_dir)
        self.manifest = load_manifest(folder, EngineManifest)
        with FileCheck(folder, self.manifest.files, verify):
            self.tokenizer = ChatTokenizer(folder)
            session = runners.find(self.manifest.backend).open_session(folder, self.manifest)
        self.formatter = Formatter(self.tokenizer, allow_special_tokens)
        self._turns = Turns()
        self._session: RecordedSession | None = RecordedSession(session)
        self._drafters: Drafters | None = None
        spec = settled(spec, folder, self.manifest) if spec is not None else None
        if spec is not None:
            self._drafters = Drafters(folder, self.manifest, session, spec, verify=verify)
        decoder = self.manifest.decoder
        self._no_images = None
        if decoder.images is not None:
            self._no_images = ImageRows.none(decoder.hidden_size, decoder.images.num_deepstack)
        self.images: ImageReader | None = None
        if multimodal_engine_dir is not None:
            from edgellm.device_runtime.engine.images import ImageReader  # imports Pillow

            self.images = ImageReader(
                Path(multimodal_engine_dir), self.manifest.decoder, verify=verify
            )
        self._end_ids = frozenset(self.manifest.eos_token_ids)
        self._guidance = Guidance(folder, decoder.vocab_size, self.manifest.eos_token_ids)
        self._reuses_context, self._kept = context_reuse, KeptContexts()

    @property
    def session(self) -> RecordedSession:
        """The base; raises `EdgeLLMError` behind `close`."""
        self._turns.require_open()
        assert self._session is not None
        return self._session

    @session.setter
    def session(self, session: RecordedSession) -> None:
        self._session = session

    def __enter__(self) -> LLM:
        """`with LLM(...) as llm:` closes it at the end."""
        self._turns.require_open()
        return self

    def __exit__(self, *_: object) -> None:
        """See `close`."""
        self.close()

    def close(self) -> None:
        """Give the memory back behind the pass that runs; unfinished answers end in an error."""
        self._turns.close()
        self._session = self._drafters = self.images = None
        self._kept = KeptContexts()

    def generate(
        self,
        prompt: str | list[dict[str, Any]],
        *,
        sampling: SamplingParams | None = None,
        max_generate_length: int = 256,
        stop: Sequence[str] = (),
        speculative: bool = True,
        **template_flags: Any,
    ) -> Answer:
        """Start an answer; nothing is computed before it is iterated over.

        Args:
            prompt: raw text, or chat messages for the model's template, whose content may be a
                list of {"type": "text", "text": ...} and {"type": "image", "image": path or URI}.
            sampling: None takes the defaults.
            max_generate_length: at most this many tokens.
            stop: strings that end the answer and do not appear in it.
            speculative: False decodes plainly although `spec` was given.
            template_flags: variables of the chat template, see `Formatter.format`.

        Raises:
            RequestError: the template refuses the messages, or the prompt does not fit.
        """
        images: list[str] = []
        if isinstance(prompt, str):
            text, is_raw = prompt, True
            arguments.refuse_flags(template_flags)
        else:
            images = arguments.image_sources(prompt)
            text, is_raw = self.formatter.format(prompt, template_flags), False
        return self.generate_text(
            text,
            images=images,
            add_special_tokens=is_raw,
            sampling=SamplingParams() if sampling is None else sampling,
            max_generate_length=max_generate_length,
            stop=stop,
            speculative=speculative,
        )

    def generate_text(
        self,
        text: str,
        *,
        images: Sequence[str] = (),
        add_special_tokens: bool,
        sampling: SamplingParams,
        max_generate_length: int,
        stop: Sequence[str],
        speculative: bool = True,
        system_prompt: str | None = None,
    ) -> Answer:
        """As `generate`, for a text that is already formatted; images are encoded at once.

        With `system_prompt`, which the text begins with, its rows are kept for later answers.
        """
        self._turns.require_open()
        arguments.require_kind("sampling", sampling, SamplingParams, "a SamplingParams")
        arguments.require_kind("speculative", speculative, bool, "True or False")
        stops = StopMatcher(arguments.text_list("stop", stop))
        max_tokens = arguments.require_length("max_generate_length", max_generate_length)
        if unknown := [t for t in sampling.logit_bias if t >= self.manifest.decoder.vocab_size]:
            raise RequestError(
                f"logit_bias names token {unknown[0]}, the model has "
                f"{self.manifest.decoder.vocab_size} tokens"
            )
        profile = Profile()
        prompt = self._prompt(text, images, profile, add_special_tokens=add_special_tokens)
        max_tokens, warnings = self._fit(len(prompt.token_ids), max_tokens)
        answer = Answer(prompt, max_tokens, warnings, profile, iter(()))
        speculates = speculative and self._drafters is not None
        sampler = self.sampler(sampling, prompt)
        rounds = (self._speculated if speculates else self._plain)(sampler, answer)
        steps = self._steps(rounds, sampler, answer, stops, speculates=speculates)
        if system_prompt is not None:
            ids = self.tokenizer.encode(system_prompt, add_special_tokens=add_special_tokens)
            steps = self._keeping(answer, steps, count_common(ids, prompt.token_ids))
        answer.steps = self._in_turn(steps)
        return answer

    def _in_turn(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps, from the first to the last while no other answer has the engine."""
        with self._turns.take() as turn:
            while True:
                with turn.computing():
                    step = next(steps, None)
                if step is None:
                    return
                yield step

    def _prompt(
        self, text: str, sources: Sequence[str], profile: Profile, *, add_special_tokens: bool
    ) -> Prompt:
        images = self.images
        if images is None:
            if sources:
                raise RequestError(
                    "the engine takes text only", hint="give a multimodal_engine_dir"
                )
            ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return Prompt(ids)
        seen: list[Seen] = []
        if sources:
            with self._turns.visiting(), profile.stage(IMAGES):
                seen = images.see(sources, Path.cwd())
        profile.image_tokens += [one.prepared.num_tokens for one in seen]
        text = images.expand(text, seen)
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return images.prompt(ids, seen)

    def sampler(self, sampling: SamplingParams, prompt: Prompt) -> Sampler:
        """What chooses the tokens of an answer; raises as `Guidance.start`."""
        guide = sampling.guide
        constraint = self._guidance.start(guide) if guide is not None else None
        return Sampler(sampling, prompt.token_ids, constraint)

    def show(self, prompt: Prompt) -> None:
        """Tell the session what image rows of a prompt stand for, before it is read."""
        if self._no_images is not None:
            self.session.set_images(prompt.images or self._no_images)

    def _plain(self, sampler: Sampler, answer: Answer) -> Iterator[Round]:
        self.show(answer.prompt)
        tokens = generate(
            self.session,
            answer.prompt.token_ids,
            sampler,
            answer.max_tokens,
            answer.profile,
            prefill_rows=self.manifest.prefill_rows,
            reused=self._reuse(answer, self.session),
        )
        for token_id in tokens:
            yield Round((token_id,))

    def _speculated(self, sampler: Sampler, answer: Answer) -> Iterator[Round]:
        assert self._drafters is not None
        drafter = self._drafters.for_requests(greedy=sampler.params.is_greedy)
        self.show(answer.prompt)
        if self._no_images is not None:
            drafter.set_images(answer.prompt.images or self._no_images)
        yield from speculate(
            self.session,
            drafter,
            answer.prompt.token_ids,
            sampler,
            answer.max_tokens,
            answer.profile,
            prefill_rows=self.manifest.prefill_rows,
            accept=self._drafters.options.accept,
            reused=self._reuse(answer, self.session, *self._drafters.caches),
        )

    def _reuse(self, answer: Answer, *caches: RowCache) -> int:
        """Rows of the prompt that the caches hold or get back; its last is always computed."""
        keys, profile = answer.prompt.keys, answer.profile
        held = min(cache.held(keys) for cache in caches) if self._reuses_context else 0
        usable, kept = self._kept.find(keys, len(caches))
        if kept is not None and usable > held:
            with profile.stage(RESTORE):
                kept.restore(usable, caches)
            held = usable
        profile.reused_tokens.append(reused := min(held, len(keys) - 1))
        return reused

    def _keeping(self, answer: Answer, steps: Iterator[Step], length: int) -> Iterator[Step]:
        """The steps, then the rows of a system prompt of `length` tokens are kept."""
        yield from steps
        caches = [self.session, *(self._drafters.caches if self._drafters is not None else ())]
        if not length:
            answer.warnings.append("nothing was kept: there is no system prompt of its own")
        elif not self._kept.keep(answer.prompt.keys[: length + 1], caches):
            limit = self._kept.limit_bytes
            answer.warnings.append(f"the system prompt takes more than {limit} bytes: not kept")

    def _fit(self, prompt_tokens: int, wanted_tokens: int) -> tuple[int, list[str]]:
        """Tokens that may be generated, and what must be said about it."""
        longest, capacity = self.manifest.max_input_len, self.manifest.max_kv_cache_capacity
        if prompt_tokens == 0:
            raise RequestError("the prompt is empty")
        if prompt_tokens > longest:
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens, the engine takes {longest}",
                hint="shorten it" + self._rebuild_hint(prompt_tokens),
            )
        room = capacity - prompt_tokens
        if room < 1:
            raise RequestError(
                f"the prompt of {prompt_tokens} tokens fills the KV cache of {capacity}",
                hint="build with a larger --maxKVCacheCapacity",
            )
        if wanted_tokens <= room:
            return wanted_tokens, []
        return room, [
            f"max_generate_length {wanted_tokens} cut to {room}: prompt and answer share "
            f"a KV cache of {capacity} tokens"
        ]

    def _rebuild_hint(self, prompt_tokens: int) -> str:
        fits = prompt_tokens < self.manifest.decoder.max_positions
        return f", or build with --maxInputLen {prompt_tokens}" if fits else ""

    def _steps(
        self,
        rounds: Iterator[Round],
        sampler: Sampler,
        answer: Answer,
        stops: StopMatcher,
        *,
        speculates: bool,
    ) -> Iterator[Step]:
        stream = self.tokenizer.stream()
        answer.profile.prompt_tokens.append(answer.prompt_token_count)
        stopped = False
        for found in rounds:
            taken, pieces, ended, stopped = self._take(found.token_ids, stream, stops)
            begin = len(answer.token_ids)
            answer.token_ids += taken
            if ended or stopped:
                answer.finish_reason = "stop"
            elif len(answer.token_ids) >= answer.max_tokens:
                answer.finish_reason = "length"
            if found.tree is not None:
                answer.profile.rounds.append(_counts(found, len(taken)))
            if speculates or not ended or len(taken) > 1:
                logprobs = tuple(sampler.logprobs[begin : begin + len(taken)])
                drafted = found if speculates else None
                yield Step(tuple(taken), "".join(pieces), drafted, tuple(pieces), logprobs)
            if ended or stopped:
                break
        profile = answer.profile
        tokens = profile.speculated_tokens if speculates else profile.generated_tokens
        tokens.append(len(answer.token_ids))
        if not stopped and (rest := _rest(stops, stream.finish())):
            yield Step((), rest)

    def _take(
        self, token_ids: Sequence[int], stream: TextStream, stops: StopMatcher
    ) -> tuple[list[int], list[str], bool, bool]:
        """The tokens up to an end, their texts, and whether an end token or a stop string came."""
        taken: list[int] = []
        pieces: list[str] = []
        for token_id in token_ids:
            taken.append(token_id)
            if token_id in self._end_ids:
                return taken, [*pieces, ""], True, False
            text, stopped = stops.push(stream.push(token_id))
            pieces.append(text)
            if stopped:
                return taken, pieces, False, True
        return taken, pieces, False, False


def _counts(found: Round, emitted: int) -> RoundCounts:
    assert found.tree is not None
    depths, _ = found.tree.layout()
    return RoundCounts(emitted, len(found.tree), int(depths.max()), len(found.path) - 1)


def _rest(stops: StopMatcher, tail: str) -> str:
    shown, stopped = stops.push(tail)
    return shown if stopped else shown + stops.finish()
