"""Conversations about drawn scenes: requests vary, replies are the scenes' captions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.device_runtime.text.tokenizer import ChatTokenizer
from edgellm.multimodal import processors
from edgellm.multimodal.positions import rotary_positions
from edgellm.multimodal.processors.qwen2_vl import Processor
from edgellm.scripts.synthetic_vlm.scenes import Scene, draw

REQUESTS = (
    "Describe the image.",
    "Describe this picture.",
    "Please describe the scene.",
    "What is in the image?",
    "What does this picture show?",
    "Tell me what you see.",
    "Read the grid row by row.",
)
CHOICES = (
    ("Describe the first image.", "Describe the second image."),
    ("What is in the first picture?", "What is in the second picture?"),
)
NEXT = ("Now describe this image.", "And what is in this picture?", "Describe the next image.")
GREETINGS = (("Hello.", "Hello! Please show me an image."), ("Hi!", "Hi! What can I do for you?"))
KINDS = ("one", "later", "two", "turns")
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in the chat template's format, and the scenes of their images in order."""

    messages: list[Message]
    scenes: tuple[Scene, ...]
    asked: Scene  # of the last reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A conversation as model input."""

    token_ids: NDArray[np.int64]  # [S]
    learned: NDArray[np.bool_]  # [S]: tokens with a loss: replies with their end tokens
    positions: NDArray[np.int64]  # [3, S]
    pixels: NDArray[np.float32]  # [P, 3*T*p*p], image after image
    grids: tuple[tuple[int, int], ...]  # height and width in patches


def converse(kind: str, *seed: int) -> Conversation:
    """Return the conversation of a seed.

    Args:
        kind: `one` picture; `later`: in the second turn; `two` in one message, with a question
            about one of them; `turns`: two turns with a picture each.
        seed: also of the scenes.
    """
    seed = (*seed, KINDS.index(kind))
    random = np.random.default_rng(seed)

    def choose(choices: Sequence[Any]) -> Any:
        return choices[int(random.integers(len(choices)))]

    first = draw(*seed, 0)
    second = draw(*seed, 1) if kind in ("two", "turns") else first
    if kind == "two":
        number = int(random.integers(2))
        asked = (first, second)[number]
        messages = [_ask(choose(CHOICES)[number], 2), _say(asked.caption)]
        return Conversation(messages, (first, second), asked)
    after = bool(random.random() < 0.2)
    messages = [_ask(choose(REQUESTS), 1, after=after), _say(first.caption)]
    if kind == "one":
        return Conversation(messages, (first,), first)
    if kind == "later":
        hello, answer = choose(GREETINGS)
        return Conversation([_ask(hello), _say(answer), *messages], (first,), first)
    messages += [_ask(choose((*NEXT, *REQUESTS)), 1), _say(second.caption)]
    return Conversation(messages, (first, second), second)


def _ask(text: str, images: int = 0, *, after: bool = False) -> Message:
    pictures = [{"type": "image"}] * images
    words = [{"type": "text", "text": text}]
    return {"role": "user", "content": words + pictures if after else pictures + words}


def _say(text: str) -> Message:
    return {"role": "assistant", "content": text}


class Encoder:
    """Encodes conversations with the device's tokenizer and image processor."""

    def __init__(self, tokenizer: ChatTokenizer, processor: Processor) -> None:
        self.tokenizer, self.processor = tokenizer, processor
        self._image_id, self._end_id = (
            self._ids(token)[0] for token in (processor.image_token, "<|im_end|>")
        )
        self._answer = self._ids("<|im_start|>assistant\n")

    @classmethod
    def read(cls, folder: Path) -> Encoder:
        """Build the encoder from a checkpoint's files."""
        processor = processors.load(folder)
        assert isinstance(processor, Processor)
        return cls(ChatTokenizer(folder), processor)

    def __call__(self, conversation: Conversation, *, prompt: bool = False) -> Encoded:
        """Encode all messages, or with `prompt` those before the last reply."""
        messages = conversation.messages[:-1] if prompt else conversation.messages
        text = self.tokenizer.render(messages, add_generation_prompt=prompt)
        prepared = [self.processor.prepare(scene.image) for scene in conversation.scenes]
        ids = np.array(self._ids(processors.expand(text, self.processor.image_token, prepared)))
        grids = tuple(image.grid for image in prepared)
        merged = [self.processor.merged(grid) for grid in grids]
        return Encoded(
            token_ids=ids,
            learned=self._learned(ids),
            positions=rotary_positions(ids, self._image_id, merged).prompt,
            pixels=np.concatenate([image.pixels for image in prepared]),
            grids=grids,
        )

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _learned(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        learned = np.zeros(len(ids), np.bool_)
        size = len(self._answer)
        for begin in range(size, len(ids) + 1):
            if ids[begin - size : begin].tolist() == self._answer:
                ends = np.flatnonzero(ids[begin:] == self._end_id)
                learned[begin : begin + int(ends[0]) + 1 if len(ends) else None] = True
        return learned
