"""Conversations as token ids, from JSONL files; the base completes prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from edgellm.core.errors import EdgeLLMError
from edgellm.core.strict_json import parse
from edgellm.multimodal.processors import Prepared
from edgellm.tools.train_draft.base import Base, Prompt
from edgellm.tools.train_draft.data.generate import generate
from edgellm.tools.train_draft.data.images import Picture

_CHUNK = 1024  # prompts between two reports, at least; an interrupt loses at most one chunk
_CHUNK_BATCHES = 4  # large batches in a chunk: of its prompts, batches of similar length are made
_PROMPT_TOKENS = 96  # maximum of a prompt that the base writes; longer ones are mostly off topic
_MAX_REPEATED_BATCHES = 3  # consecutive batches without a new prompt


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation: a prompt and the answer's token ids, on which the draft is trained."""

    prompt: Prompt
    answer: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """Token ids of the whole conversation."""
        return self.prompt.ids + self.answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Options for completing prompts with the base."""

    max_new_tokens: int
    sampled_share: float  # share of prompts sampled at `temperature`; the others are greedy
    temperature: float
    batch: int
    seed: int
    generation_minutes: float = 0.0  # no batch begins later; 0: all prompts are completed

    @property
    def chunk(self) -> int:
        """Number of prompts that are completed before they are stored."""
        return max(_CHUNK, _CHUNK_BATCHES * self.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rendered:
    """A conversation as text."""

    number: int  # of its line
    prompt: str
    whole: str | None  # None: the base has to generate the answer
    pictures: tuple[Picture, ...]


def read_conversations(paths: Sequence[Path], base: Base) -> tuple[list[Sample], list[Prompt]]:
    """Read samples, and prompts without an answer, from JSONL files of {"messages": [...]}.

    A content may be a list of {"type": "text", "text": ...} and {"type": "image", "image": path};
    paths are relative to the file. Empty lines and repeated prompts are skipped.

    Raises:
        EdgeLLMError: a file is missing or a line is not such a conversation.
    """
    samples: list[Sample] = []
    prompts: dict[Prompt, None] = {}
    for path in paths:
        if not path.is_file():
            raise EdgeLLMError(
                f"no such data file: {path}", hint="give --data a JSONL file that exists"
            )
        rendered = []
        # Not str.splitlines: JSON strings may contain its other line ends.
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
            if line.strip():
                with _explained(path, number):
                    rendered.append(_rendered(base, line, number, path.absolute().parent))
        texts = [text for one in rendered for text in (one.prompt, one.whole) if text is not None]
        ids = iter(_ids(base, texts))
        for one in rendered:
            prompt = next(ids)
            if one.whole is None:
                prompts[Prompt(prompt, one.pictures)] = None
                continue
            with _explained(path, one.number):
                samples.append(_sample(prompt, next(ids), one.pictures))
    return samples, list(prompts)


@contextmanager
def _explained(path: Path, number: int) -> Iterator[None]:
    """Name the file and the line in errors."""
    try:
        yield
    except EdgeLLMError as error:
        raise EdgeLLMError(f"{path} line {number}: {error}", hint=error.hint) from None
    except (ValueError, KeyError, TypeError, IndexError, TemplateError) as error:
        raise EdgeLLMError(
            f"{path} line {number} is not a conversation: {error!r}",
            hint='each line is {"messages": [{"role": "user", "content": "..."}]}',
        ) from None


def _rendered(base: Base, line: bytes, number: int, folder: Path) -> _Rendered:
    """Parse one line, and apply the chat template."""
    messages = parse(line)["messages"]
    if not all(isinstance(m["role"], str) and m["content"] is not None for m in messages):
        raise TypeError("a message has no role or no content")
    opened = [_open_picture(base, source, folder) for source in _sources(messages)]
    pictures = tuple(picture for picture, _ in opened)
    prepared = [one for _, one in opened]
    has_answer = messages[-1]["role"] == "assistant"
    before = messages[:-1] if has_answer else messages
    prompt = _text(base, before, prepared, answer_next=True)
    whole = _text(base, messages, prepared, answer_next=False) if has_answer else None
    return _Rendered(number=number, prompt=prompt, whole=whole, pictures=pictures)


def _sample(
    prompt: tuple[int, ...], whole: tuple[int, ...], pictures: tuple[Picture, ...]
) -> Sample:
    """Separate the answer from a whole conversation."""
    # Some templates render the generation prompt differently from earlier answers.
    pairs = enumerate(zip(prompt, whole, strict=False))
    begin = next((at for at, (one, other) in pairs if one != other), min(len(prompt), len(whole)))
    if begin == len(whole):
        raise ValueError("the chat template drops the answer")
    return Sample(Prompt(whole[:begin], pictures), whole[begin:])


def _sources(messages: list[dict[str, Any]]) -> list[str]:
    """Return the paths or URIs of a conversation's pictures."""
    items = [
        item
        for message in messages
        for item in (message["content"] if isinstance(message["content"], list) else ())
    ]
    if unknown := {item["type"] for item in items} - {"text", "image"}:
        raise ValueError(f"{', '.join(sorted(unknown))} is neither text nor image")
    return [item["image"] for item in items if item["type"] == "image"]


def _open_picture(base: Base, source: str, folder: Path) -> tuple[Picture, Prepared]:
    if base.pictures is None:
        raise EdgeLLMError(
            "the base takes text only", hint="give the folder of a Qwen, InternVL or SmolVLM model"
        )
    return base.pictures.prepare(source, folder)


def _text(
    base: Base, messages: list[dict[str, Any]], prepared: list[Prepared], *, answer_next: bool
) -> str:
    text = base.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=answer_next
    )
    assert isinstance(text, str)
    return text if base.pictures is None else base.pictures.expand(text, prepared)


def _ids(base: Base, texts: list[str]) -> list[tuple[int, ...]]:
    """Tokenize all texts at once, which uses all cores."""
    if not texts:
        return []
    return [tuple(ids) for ids in base.tokenizer(texts, add_special_tokens=False)["input_ids"]]


def write_prompts(base: Base, store: Path, count: int, how: Generation) -> Iterator[int]:
    """Let the base write `count` different prompts into the JSONL file `store`; yield their number.

    After the opening of a user's turn, a chat model generates typical user prompts (Magpie, arXiv
    2406.08464). They are sampled at temperature 1; prompts without an end token are dropped. Whole
    batches are appended; interrupts do not change the result.

    Raises:
        EdgeLLMError: the template has no user's turn, or the base repeats itself.
    """
    tokenizer = base.tokenizer
    opening, end = _user_turn(tokenizer)
    special = frozenset(tokenizer.all_special_ids)
    _drop_cut_line(store)
    lines = store.read_text("utf-8").splitlines() if store.exists() else []
    written = {json.loads(line)["messages"][0]["content"] for line in lines}
    yield len(written)
    num_repeated = 0
    while len(written) < count:
        rows = generate(
            base, [Prompt(tuple(opening))] * max(_CHUNK, how.batch), stop_ids=frozenset([end]),
            max_new_tokens=_PROMPT_TOKENS, temperature=1.0, batch=how.batch,
            seed=how.seed + len(written) + num_repeated,
        )  # fmt: skip
        whole = [ids[:-1] for _, ids in rows if ids[-1] == end]
        texts = [str(tokenizer.decode(ids)).strip() for ids in whole if special.isdisjoint(ids)]
        new = [text for text in dict.fromkeys(texts) if text and text not in written]
        new = new[: count - len(written)]
        with store.open("a", encoding="utf-8") as stream:
            for text in new:
                stream.write(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n")
        written.update(new)
        yield len(written)
        num_repeated = 0 if new else num_repeated + 1
        if num_repeated == _MAX_REPEATED_BATCHES:
            raise EdgeLLMError(
                f"the base wrote only {len(written)} different prompts that end",
                hint="give prompts with --data, and fewer --self_prompts",
            )


def _user_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """Return the ids that open a user's turn, and the id that ends it."""
    mark = "edgellm's place for a question"
    shown = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    assert isinstance(shown, str)
    opening, found, ending = shown.partition(mark)
    ids = tokenizer(ending, add_special_tokens=False)["input_ids"]
    if not (found and opening and ids):
        raise EdgeLLMError(
            "the chat template does not delimit a user's turn",
            hint="give prompts with --data instead of --self_prompts",
        )
    return list(tokenizer(opening, add_special_tokens=False)["input_ids"]), ids[0]


def answer_prompts(
    base: Base,
    prompts: Sequence[Prompt],
    store: Path,
    how: Generation,
    deadline: float | None = None,
) -> Iterator[int]:
    """Let the base complete `prompts` into the JSONL file `store`; yield the number of answers.

    Prompts with a stored answer are skipped. Answers do not depend on interrupts: the batches are
    always the same, and an interrupted batch is repeated. No batch begins after `deadline` (of
    `time.monotonic`).
    """
    done = begin_answers(store)
    yield sum(prompt in done for prompt in prompts)
    for start in range(0, len(prompts), how.chunk):
        chunk = prompts[start : start + how.chunk]
        if all(prompt in done for prompt in chunk):
            continue
        sampled = round(len(chunk) * how.sampled_share)
        for part, temperature in ((chunk[sampled:], 0.0), (chunk[:sampled], how.temperature)):
            if all(prompt in done for prompt in part):
                continue
            rows = generate(
                base, part, stop_ids=base.stop_ids, max_new_tokens=how.max_new_tokens,
                temperature=temperature, batch=how.batch, seed=how.seed + start, deadline=deadline,
            )  # fmt: skip
            new = [Sample(part[at], tuple(ids)) for at, ids in rows if part[at] not in done]
            add_answers(store, new)
            done.update(sample.prompt for sample in new)
        if deadline is not None and time.monotonic() >= deadline:
            yield sum(prompt in done for prompt in prompts)
            return
        yield start + len(chunk)


def begin_answers(store: Path) -> set[Prompt]:
    """Return the prompts with an answer in `store`; remove an incomplete last line."""
    _drop_cut_line(store)
    return {sample.prompt for sample in stored_answers(store)}


def add_answers(store: Path, samples: Sequence[Sample]) -> None:
    """Append samples as whole lines."""
    with store.open("a", encoding="utf-8") as stream:
        stream.write("".join(_line(sample) for sample in samples))


def sampled_places(prompts: Sequence[Prompt], how: Generation) -> range:
    """Return the indices of sampled prompts, for servers, which have no batches."""
    return range(round(len(prompts) * how.sampled_share))


def _line(sample: Sample) -> str:
    record: dict[str, Any] = {"prompt": sample.prompt.ids, "answer": sample.answer}
    if sample.prompt.pictures:
        record["pictures"] = [[one.source, one.grid] for one in sample.prompt.pictures]
    return json.dumps(record) + "\n"


def _drop_cut_line(store: Path) -> None:
    """Remove an incomplete last line, which an interrupt may leave."""
    if not store.exists():
        return
    with store.open("r+b") as stream:
        content = stream.read()
        stream.truncate(content.rfind(b"\n") + 1)


def stored_answers(store: Path) -> list[Sample]:
    """Return the stored samples; damaged lines are skipped, so that they are generated again."""
    if not store.exists():
        return []
    lines = store.read_bytes().splitlines()
    return [sample for line in lines if (sample := _stored(line)) is not None]


def _stored(line: bytes) -> Sample | None:
    try:
        record = json.loads(line)
        pictures = [
            Picture(source, (rows, columns))
            for source, (rows, columns) in record.get("pictures", ())
        ]
        return Sample(Prompt(tuple(record["prompt"]), tuple(pictures)), tuple(record["answer"]))
    except (ValueError, KeyError, TypeError):
        return None


def draft_vocabulary(samples: Sequence[Sample], vocab_size: int, size: int) -> np.ndarray:
    """Return the ids of the `size` most frequent answer tokens, ascending, int64 [size]."""
    counts = np.zeros(vocab_size, np.int64)
    for sample in samples:
        np.add.at(counts, np.asarray(sample.answer, np.int64), 1)
    return np.sort(np.argsort(-counts, kind="stable")[:size])
