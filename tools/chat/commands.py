"""Chat commands: lines that begin with a slash."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgellm.core.errors import RequestError
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.tools.chat.conversation import Conversation
from edgellm.tools.chat.statistics import statistics

_COMMAND = re.compile(r"/(?P<name>\w+)(?:\s+(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Command:
    """A chat command; `run` returns the lines to show."""

    value: str  # placeholder of its argument, "" without one
    about: str
    run: Callable[[Conversation, str], list[str]]

    @property
    def takes_path(self) -> bool:
        """Whether the argument is a file."""
        return self.value == "FILE"


def parse(line: str) -> tuple[str, str] | None:
    """Return name and argument of a command; None for a message like `/etc/hosts is what?`."""
    match = _COMMAND.fullmatch(line.strip())
    return (match["name"], (match["value"] or "").strip()) if match else None


def run(conversation: Conversation, name: str, value: str) -> list[str]:
    """Run a command other than /quit and /continue.

    Raises:
        EdgeLLMError: the command is unknown or fails.
    """
    command = COMMANDS.get(name)
    if command is None:
        raise RequestError(f"no such command: /{name}", hint="/help lists them")
    if command.takes_path and not value:
        raise RequestError(f"/{name} needs a file", hint=f"/{name} {command.value}")
    if value and not command.value:
        raise RequestError(f"/{name} takes no argument", hint=f"/{name} alone")
    return command.run(conversation, value)


def _image(conversation: Conversation, value: str) -> list[str]:
    conversation.attach(Path(value))
    return [f"{Path(value).name}: goes with the next message ({len(conversation.images)} in all)"]


def _audio(conversation: Conversation, value: str) -> list[str]:
    conversation.attach_audio(Path(value))
    return [f"{Path(value).name}: goes with the next message ({len(conversation.clips)} in all)"]


def _system(conversation: Conversation, value: str) -> list[str]:
    if value:
        conversation.system = value
    return [f"system: {conversation.system}" if conversation.system else "no system prompt"]


def _reset(conversation: Conversation, _: str) -> list[str]:
    conversation.reset()
    return ["a new conversation"]


def _stats(conversation: Conversation, _: str) -> list[str]:
    manifest = conversation.llm.manifest
    lines = statistics(conversation.totals, conversation.context_tokens, manifest)
    return [*lines[:-1], _sampling(conversation.settings.sampling), lines[-1]]


def _sampling(params: SamplingParams) -> str:
    if params.is_greedy:
        return "sampling: greedy"
    return (
        f"sampling: temperature {params.temperature:g}, top-p {params.top_p:g}, "
        f"top-k {params.top_k}, seed {params.seed}"
    )


def _save(conversation: Conversation, value: str) -> list[str]:
    conversation.save(Path(value))
    return [f"{value}: {len(conversation.messages)} messages"]


def _help(_: Conversation, __: str) -> list[str]:
    names = {f"/{name} {command.value}": command.about for name, command in COMMANDS.items()}
    return [f"{name:<14}{about}" for name, about in names.items()]


COMMANDS = {
    "image": Command("FILE", "attach an image to the next message", _image),
    "audio": Command("FILE", "attach audio to the next message", _audio),
    "system": Command("TEXT", "set the system prompt; alone, show it", _system),
    "continue": Command("", "continue the last answer", lambda *_: []),
    "reset": Command("", "clear the conversation, keep the system prompt", _reset),
    "stats": Command("", "show speeds, tokens and context so far", _stats),
    "save": Command("FILE", "write the conversation as a request file of llm_inference", _save),
    "help": Command("", "list the commands", _help),
    "quit": Command("", "leave, as Ctrl-D does", lambda *_: []),
}
