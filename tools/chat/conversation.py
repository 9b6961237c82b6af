"""A conversation: its messages, and the engine's outputs."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgellm.core.artifact import check_output_file, replace_file
from edgellm.core.errors import RequestError
from edgellm.device_runtime.api.llm import LLM, RequestOutput
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.multimodal.media import Audio
from edgellm.tools.chat.statistics import Totals

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """Generation settings of all turns."""

    sampling: SamplingParams
    max_generate_length: int
    enable_thinking: bool


@dataclass(slots=True, kw_only=True)
class Conversation:
    """Messages and statistics of a chat; a message that fails changes nothing."""

    llm: LLM
    settings: Settings
    system: str = ""
    turns: list[Message] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # for the next message
    clips: list[str] = field(default_factory=list)  # of audio, for the next message
    totals: Totals = field(default_factory=Totals)
    context_tokens: int = 0  # of the latest prompt and its output

    @property
    def messages(self) -> list[Message]:
        """System prompt and turns, as the chat template gets them."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns]

    def ask(self, text: str) -> RequestOutput:
        """Start a request for a message; `keep` adds its output to the conversation.

        Raises:
            RequestError: the message does not fit, alone or after this conversation.
        """
        message = self._message(text)
        try:
            return self._start([*self.messages, message])
        except RequestError as error:
            if self.turns and self._fits_alone(message):
                raise RequestError(
                    f"the conversation is too long: {error}",
                    hint="/reset clears it; /save FILE writes it to a file before",
                ) from None
            raise

    def continue_last(self) -> RequestOutput:
        """Start a request that continues the last answer; `keep` adds its output.

        Raises:
            RequestError: there is no answer yet, or it cannot be continued.
        """
        if not self.turns:
            raise RequestError("there is no answer yet", hint="type a message first")
        return self._start(self.messages)

    def keep(self, text: str | None, output: RequestOutput) -> None:
        """Add a message and its output, finished or not; without a message, extend the last one."""
        if text is None:
            last = self.turns.pop()
            self.turns.append({**last, "content": last["content"] + output.text})
        else:
            reply = {"role": "assistant", "content": output.text}
            self.turns += [self._message(text), reply]
            self._detach()
        self.totals.add(output)
        self.context_tokens = output.prompt_token_count + len(output.token_ids)

    def attach(self, path: Path) -> None:
        """Attach an image to the next message; the visual encoder runs at once.

        Raises:
            RequestError: it cannot be read, or the engine takes text only.
        """
        if self.llm.images is None:
            raise RequestError(
                "the engine takes text only",
                hint="give the folder of a visual engine as --multimodalEngineDir",
            )
        found = str(_expanded(path).absolute())
        self.llm.images.see([found], Path.cwd())
        self.images.append(found)

    def attach_audio(self, path: Path) -> None:
        """Attach audio to the next message; the audio encoder runs at once.

        Raises:
            RequestError: it cannot be read, or the engine takes no audio.
        """
        found = str(_expanded(path).absolute())
        self.llm.require_readers([Audio(found)])
        assert self.llm.audio is not None
        self.llm.audio.hear([Audio(found)], Path.cwd())
        self.clips.append(found)

    def reset(self) -> None:
        """Clear the turns and attached files; keep the system prompt."""
        self.turns.clear()
        self._detach()
        self.context_tokens = 0

    def save(self, path: Path) -> None:
        """Write a request file of llm_inference: one request with all messages so far.

        Raises:
            EdgeLLMError: the file cannot be written.
        """
        path = _expanded(path)
        check_output_file(path)
        content = {"requests": [{"messages": self.messages}]}
        replace_file(path, json.dumps(content, indent=4, ensure_ascii=False) + "\n")

    def _detach(self) -> None:
        self.images.clear()
        self.clips.clear()

    def _message(self, text: str) -> Message:
        if not self.images and not self.clips:
            return {"role": "user", "content": text}
        items = [{"type": "image", "image": path} for path in self.images]
        items += [{"type": "audio", "audio": path} for path in self.clips]
        return {"role": "user", "content": [*items, {"type": "text", "text": text}]}

    def _start(self, messages: list[Message]) -> RequestOutput:
        return self.llm.generate(
            messages,
            sampling=self.settings.sampling,
            max_generate_length=self.settings.max_generate_length,
            enable_thinking=self.settings.enable_thinking,
        )

    def _fits_alone(self, message: Message) -> bool:
        try:
            self._start([*self.messages[: -len(self.turns)], message])  # computes nothing
        except RequestError:
            return False
        return True


def _expanded(path: Path) -> Path:
    """A path that a user typed, with the home folder in place of ~.

    Raises:
        RequestError: it contains a zero byte, or names an unknown user.
    """
    try:
        found = path.expanduser()
        os.fsencode(found)
    except (RuntimeError, ValueError) as error:
        raise RequestError(f"{str(path)!r} is not a path: {error}", hint="give a path") from None
    if "\0" in str(found):
        raise RequestError(f"{str(path)!r} is not a path: a zero byte", hint="give a path")
    return found
