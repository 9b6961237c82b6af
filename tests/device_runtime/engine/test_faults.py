"""An error of one sequence, in any of its hooks, ends only that sequence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from edgellm.core.errors import (
    EdgeLLMError,
    UnexpectedError,
)
from edgellm.device_runtime import LLM, BatchError, SamplingParams, SpecOptions
from edgellm.device_runtime.api.generation_request import GenerationRequest
from edgellm.device_runtime.scheduler.request_output import RequestOutput
from edgellm.device_runtime.speculate.policy.spec_gate import SpecGate

PROMPTS = ["w20 w30 w40", "w21 w31 w41", "w22 w32 w42"]
VICTIM, LENGTH = 1, 12
SAMPLING = SamplingParams(
    temperature=1.0, top_p=1.0, top_k=0, seed=7, num_logprobs=1
)  # so that logits are looked at
ERRORS = [ValueError("boom"), RuntimeError("boom\nsecond line"), EdgeLLMError("boom", hint="mend")]


class PanicException(BaseException):
    """Named like the panics of Rust extension modules, and not an `Exception`."""


class Hook:
    """Raises when called, or when called for the victim, and records it."""

    def __init__(self, error: BaseException, *, after: int = 0) -> None:
        self.error, self.left, self.is_hit, self.is_late = error, after, False, False

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.is_hit = True
        raise self.error

    def before(self, action: Callable[..., Any], concerns: Callable[..., bool]) -> Callable:
        def hooked(*given: Any, **named: Any) -> Any:
            is_concerned = concerns(*given, **named)
            self.left -= is_concerned
            if is_concerned and self.left < 0:
                if self.is_late:
                    action(*given, **named)
                self()
            return action(*given, **named)

        return hooked


class HookedDrafter:
    """The victim's drafter; one of its methods or properties raises."""

    def __init__(self, drafter: Any, name: str, hook: Hook) -> None:
        self.__dict__.update(_drafter=drafter, _name=name, _hook=hook)

    def __getattr__(self, name: str) -> Any:
        if name == "is_paused" and self._name == "observe_plain":
            return True
        if name != self._name:
            return getattr(self._drafter, name)
        return self._hook() if name == "is_paused" else self._hook

    def __setattr__(self, name: str, value: Any) -> None:
        if name == self._name:
            self._hook()
        setattr(self._drafter, name, value)


def _in_drafter(name: str) -> Callable:
    def place(_: LLM, answer: RequestOutput, hook: Hook) -> None:
        sequence = answer._entry.sequence
        sequence.drafter = HookedDrafter(sequence.drafter, name, hook)

    return place


def _in_generator(name: str) -> Callable:
    """After the drafter's first pass, which it shares with others."""

    def place(_: LLM, answer: RequestOutput, hook: Hook) -> None:
        drafter = answer._entry.sequence.drafter
        work = getattr(drafter, name)

        def begun(*given: Any) -> Any:
            passes = work(*given)
            yield next(passes)
            hook()

        setattr(drafter, name, begun)

    return place


def _in_own(path: str) -> Callable:
    """In an object of the victim only."""

    def place(_: LLM, answer: RequestOutput, hook: Hook) -> None:
        *owners, name = path.split(".")
        own: Any = answer._entry
        for owner in owners:
            own = getattr(own, owner)
        setattr(own, name, hook)

    return place


def _in_grammar(name: str) -> Callable:
    def place(_: LLM, answer: RequestOutput, hook: Hook) -> None:
        class Grammar:
            def apply(self, logits: Any, *_: Any) -> Any:
                return logits

            def take(self, token_ids: Any) -> None:
                pass

        sampler, grammar = answer._entry.sequence.sampler, Grammar()
        setattr(grammar, name, hook)
        sampler._constraint, sampler._adjusts = grammar, True

    return place


def _in_slot(name: str, after: int = 0) -> Callable:
    def place(llm: LLM, answer: RequestOutput, hook: Hook) -> None:
        victim, hook.left = answer._entry.sequence, after
        shared = getattr(llm.kv_cache_manager, name)
        setattr(llm.kv_cache_manager, name, hook.before(shared, lambda one, *_: one is victim))

    return place


def _in_pass(*, of_draft: bool, is_late: bool = False) -> Callable:
    """A forward pass that fails whenever the victim shares it, before or after it has run."""

    def place(llm: LLM, answer: RequestOutput, hook: Hook) -> None:
        hook.is_late, hook.left = is_late, 1  # not the prompt's
        kv_cache_manager, victim = llm.kv_cache_manager, answer._entry.sequence
        network = _draft(llm) if of_draft else kv_cache_manager.base

        def concerns(parts: Any) -> bool:
            own = kv_cache_manager._begun.get(victim)
            if own is None:
                return False
            kv = own[1].kv if of_draft else own[0]
            return any(part.kv is kv for part in parts)

        network.run_batch = hook.before(network.run_batch, concerns)

    return place


def _draft(llm: LLM) -> Any:
    return llm.kv_cache_manager._networks[1].network


def _in_kv(name: str) -> Callable:
    """A method of the victim's KV cache in the base."""

    def place(llm: LLM, answer: RequestOutput, hook: Hook) -> None:
        victim, new_kv = answer._entry.sequence, llm.base.new_kv

        def hooked() -> Any:
            kv = new_kv()
            setattr(kv, name, hook.before(getattr(kv, name), lambda *_: kv is victim.kv))
            return kv

        llm.base.new_kv = hooked

    return place


def _in_callback(_: LLM, answer: RequestOutput, hook: Hook) -> None:
    answer.before_pass = hook


HOOKS = {
    "stream push": _in_own("sequence.endings.stream.push"),
    "stop strings": _in_own("sequence.endings._stops.push"),
    "endings": _in_own("sequence.endings.take"),
    "rest of the text": _in_own("sequence.endings.rest"),
    "sampler draw": _in_own("sequence.sampler.choose"),
    "log-probabilities": _in_own("sequence.sampler.record"),
    "grammar mask": _in_grammar("apply"),
    "grammar commit": _in_grammar("take"),
    "acceptance": _in_own("sequence.accept"),
    "before_pass": _in_callback,
    "admission": _in_slot("admit"),
    "admission in the middle": _in_slot("admit", 3),
    "waiting for others": _in_slot("should_wait"),
    "end of the prompt": _in_slot("end_prompt"),
    "end in the caches": _in_slot("end"),
    "begin of its rows": _in_slot("_restored"),
    "forward pass": _in_pass(of_draft=False),
    "draft's forward pass": _in_pass(of_draft=True),
    "end of a forward pass": _in_pass(of_draft=False, is_late=True),
    "end of a draft's forward pass": _in_pass(of_draft=True, is_late=True),
    "compaction": _in_kv("compact"),
    "text in the cache": _in_kv("begin"),
    "catch_up in the middle": _in_generator("catch_up"),
    "propose in the middle": _in_generator("propose"),
    **{
        f"drafter {name}": _in_drafter(name)
        for name in (
            "set_adapter",
            "begin",
            "remember",
            "observe",
            "catch_up",
            "plan_round",
            "propose",
            "learn",
            "confidences",
            "is_paused",
            "observe_plain",
            "batch_load",
        )
    },
}
# Errors that do not affect the output become warnings.
WARNED = {
    "drafter end": _in_drafter("end"),
    "drafter drop": _in_drafter("drop"),
    "kept rows": _in_slot("is_pin_due"),
}


@pytest.fixture(scope="module")
def llm(shared_engine):
    """Drafts in every round, whatever the measured costs."""
    pace_of = SpecGate._pace_of

    def awake(self: SpecGate, answers: int) -> Any:
        pace = pace_of(self, answers)
        pace.network.pause = 0
        return pace

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpecGate, "_pace_of", awake)
        with LLM(shared_engine, spec=SpecOptions(tree="fixed")) as found:
            yield found


def _asked(llm: LLM, **options: Any) -> list[RequestOutput]:
    return [
        llm.generate_text(
            GenerationRequest(
                text=prompt,
                add_special_tokens=False,
                sampling=SAMPLING,
                max_generate_length=LENGTH,
                stop=["w9999"],
                system_prompt="w21" if at == VICTIM else None,
                **options,
            )
        )
        for at, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def expected(llm):
    answers = _asked(llm)
    for _ in llm.together(answers):
        pass
    return [(one.token_ids, one.text, one.finish_reason) for one in answers]


def _facts(answer: RequestOutput) -> tuple:
    return answer.token_ids, answer.text, answer.finish_reason


@pytest.fixture
def free(llm):
    """Check that no resources are held after a test, and that shared state is intact."""
    kv_cache_manager = llm.kv_cache_manager
    before = (
        kv_cache_manager.num_free,
        _draft(llm)._swapper.pool.num_free,
    )
    shared = [kv_cache_manager, kv_cache_manager.base, _draft(llm)]
    own = [set(vars(one)) for one in shared]
    yield
    for one, names in zip(shared, own, strict=True):
        for name in set(vars(one)) - names:
            delattr(one, name)
    assert llm._turns._batch.entries == []
    assert (
        kv_cache_manager.num_free,
        _draft(llm)._swapper.pool.num_free,
    ) == before
    assert not kv_cache_manager._begun


def _require_cause(failure: BaseException | None, error: BaseException) -> None:
    assert failure is not None
    assert "boom" in str(failure)
    assert "second line" not in str(failure) or failure is error
    if failure is not error:  # exceptions of a caller's own callback are not wrapped
        assert isinstance(failure, UnexpectedError)
        assert failure.__cause__ is error
        assert str(failure) == f"{type(error).__name__}: boom"
        assert failure.hint


@pytest.mark.each_change("*-ValueError", "sampler draw-*", "drafter propose-*")
@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", HOOKS)
def test_an_error_in_a_hook_ends_only_its_sequence(llm, expected, name, error):
    answers, hook = _asked(llm), Hook(error)
    HOOKS[name](llm, answers[VICTIM], hook)
    for _ in llm.together(answers):
        pass
    assert hook.is_hit
    _require_cause(answers[VICTIM].failure, error)
    assert not answers[VICTIM].is_complete
    assert expected[VICTIM][1].startswith(answers[VICTIM].text)
    others = [(at, one) for at, one in enumerate(answers) if at != VICTIM]
    assert [_facts(one) for _, one in others] == [expected[at] for at, _ in others]
    assert all(one.is_complete and one.failure is None for _, one in others)


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", WARNED)
def test_errors_after_the_output_become_warnings(llm, expected, name, error):
    answers, hook = _asked(llm), Hook(error)
    WARNED[name](llm, answers[VICTIM], hook)
    for _ in llm.together(answers):
        pass
    assert llm.kv_cache_manager.num_free  # finished sequences are retired
    assert hook.is_hit
    assert [_facts(one) for one in answers] == expected
    assert any("boom" in line for line in answers[VICTIM].warnings)


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize(
    "error",
    [
        PanicException("boom"),
        asyncio.CancelledError("boom"),
        StopIteration("boom"),
        OSError("boom"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("name", ["stream push", "grammar mask", "drafter propose"])
def test_rust_panics_are_confined(llm, expected, name, error):
    answers, hook = _asked(llm), Hook(error)
    HOOKS[name](llm, answers[VICTIM], hook)
    for _ in llm.together(answers):
        pass
    assert hook.is_hit
    assert "boom" in str(answers[VICTIM].failure)
    assert [_facts(answers[at]) for at in (0, 2)] == [expected[at] for at in (0, 2)]


@pytest.mark.usefixtures("free")
def test_out_of_memory_is_reported(llm):
    answers = _asked(llm)
    HOOKS["sampler draw"](llm, answers[VICTIM], Hook(MemoryError()))
    with pytest.raises(EdgeLLMError, match="out of memory"):
        list(answers[VICTIM])


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_interrupts_are_not_confined(llm, interrupt):
    answers = _asked(llm)
    HOOKS["stream push"](llm, answers[VICTIM], Hook(interrupt()))
    with pytest.raises(interrupt):
        for _ in llm.together(answers):
            pass


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("name", ["stream push", "drafter propose", "forward pass"])
def test_errors_reach_only_their_thread_or_task(llm, expected, name):
    def read(answer):
        for _ in answer:
            pass
        return _facts(answer)

    async def await_all(answers):
        async def read_one(answer):
            async for _ in answer:
                pass
            return _facts(answer)

        return await asyncio.gather(*map(read_one, answers), return_exceptions=True)

    for is_async in (False, True):
        answers = _asked(llm)
        HOOKS[name](llm, answers[VICTIM], Hook(ERRORS[0]))
        if is_async:
            found = asyncio.run(await_all(answers))
        else:
            with ThreadPoolExecutor(3) as pool:
                asked = [pool.submit(read, one) for one in answers]
                found = [one.exception(60) or one.result() for one in asked]
        _require_cause(found[VICTIM], ERRORS[0])
        assert [found[at] for at in (0, 2)] == [expected[at] for at in (0, 2)]
        llm.kv_cache_manager.base.__dict__.pop("run_batch", None)


@pytest.mark.usefixtures("free")
def test_batch_error_holds_the_other_outputs(llm, expected, monkeypatch):
    made = iter(_asked(llm))
    answers = [next(made) for _ in PROMPTS]
    HOOKS["stream push"](llm, answers[VICTIM], Hook(ERRORS[0]))
    left = iter(answers)
    monkeypatch.setattr(llm, "generate", lambda *_, **__: next(left))
    with pytest.raises(
        BatchError, match=r"1 of 3 outputs failed, prompt 1 first: ValueError: boom"
    ):
        llm.generate_batch(PROMPTS)
    assert [_facts(answers[at]) for at in (0, 2)] == [expected[at] for at in (0, 2)]


@pytest.mark.usefixtures("free")
def test_an_error_in_the_generator_keeps_started_requests(llm, expected):
    begun = _asked(llm)

    def answers():
        yield from begun[:2]
        raise ZeroDivisionError("no third")

    with pytest.raises(ZeroDivisionError, match="no third"):
        for _ in llm.together(answers()):
            pass
    assert [_facts(one) for one in begun[:2]] == expected[:2]


@pytest.mark.usefixtures("free")
def test_a_failing_pass_callback_is_dropped(llm, expected, caplog):
    hook = Hook(ERRORS[0])
    llm.on_pass(hook)
    answers = _asked(llm)
    for _ in llm.together(answers):
        pass
    assert hook.is_hit
    assert [_facts(one) for one in answers] == expected
    assert "on_pass failed" in caplog.text


# ------------------------------------------------------------------ cancelled tasks
@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("how", ["cancel", "wait_for"])
def test_a_cancelled_task_frees_its_place_at_once(llm, expected, how):
    """The running pass finishes, and nothing else of the cancelled requests."""
    passes = []

    async def read(answer):
        async for _ in answer:
            pass
        return _facts(answer)

    async def cancelled():
        answers = _asked(llm)
        if how == "wait_for":
            llm.on_pass(lambda *_: time.sleep(0.02))
            for one in answers:
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(read(one), 0.03)
        else:
            tasks = [asyncio.create_task(read(one)) for one in answers]
            while not any(one.token_ids for one in answers):
                await asyncio.sleep(0.001)
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(one, asyncio.CancelledError) for one in ended)
        assert llm._turns._batch.entries == []
        assert not any(one.is_complete for one in answers)
        llm.on_pass(lambda *_: passes.append(time.monotonic()))
        begin = time.monotonic()
        found = await asyncio.gather(*map(read, _asked(llm)))
        return found, time.monotonic() - begin

    found, seconds = asyncio.run(cancelled())
    assert found == expected
    assert seconds < 10  # no turn of `PATIENCE_S` was waited for
    llm.on_pass(lambda *_: None)


@pytest.mark.usefixtures("free")
def test_outputs_of_a_closed_event_loop_hold_up_no_other(llm, expected):
    """Its tasks neither continue nor end; their places in the batch are free at once."""
    answers, loop = _asked(llm), asyncio.new_event_loop()

    async def read(answer):
        async for _ in answer:
            if answer is answers[0]:
                loop.stop()

    tasks = [loop.create_task(read(one)) for one in answers]
    loop.run_forever()
    loop.close()
    others, begin = _asked(llm), time.monotonic()
    for one in others:
        for _ in one:
            pass
    assert time.monotonic() - begin < 10  # others would wait for 30 seconds
    assert [_facts(one) for one in others] == expected
    assert llm._turns._batch.entries == []
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task._log_destroy_pending = False
