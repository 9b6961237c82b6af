"""`edgellm-chat`: chat with an engine."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from edgellm.core.cli import CAMEL_CASE, App, run_command
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.requests.spec_flags import SpecFlags, with_spec_flags
from edgellm.tools.chat.flags import ChatFlags, with_chat_flags, with_sampling_flags

if TYPE_CHECKING:
    from prompt_toolkit.history import History

    from edgellm.tools.chat.conversation import Conversation
    from edgellm.tools.chat.repl import Screen

_SEED_BYTES = 4

app = App(CAMEL_CASE)


@app.command(
    common=("--engineDir", "--system", "--spec", "--temperature", "--maxGenerateLength"),
    examples=(
        "edgellm-chat --engineDir engine",
        "edgellm-chat --engineDir engine --eagle --system 'Answer in one sentence.'",
    ),
)
@with_spec_flags
@with_sampling_flags
@with_chat_flags
def chat(
    flags: ChatFlags,
    spec_flags: SpecFlags,
    sampling_flags: Any,
) -> None:
    """Chat with an engine; /help lists the commands.

    Without a terminal, each line of standard input is a message; the reply is printed.
    """
    from edgellm.device_runtime.api.llm import LLM
    from edgellm.device_runtime.sampling.params import SamplingParams
    from edgellm.tools.chat.conversation import Conversation, Settings
    from edgellm.tools.chat.repl import run

    values = asdict(sampling_flags)
    if values["seed"] is None:
        values["seed"] = int.from_bytes(os.urandom(_SEED_BYTES), "little")
    sampling = SamplingParams(**values)
    llm = LLM(
        flags.engine_dir,
        verify=flags.verify,
        spec=spec_flags.read(),
        multimodal_engine_dir=flags.multimodal_engine_dir,
        context_reuse=True,
        allow_special_tokens=flags.allow_special_tokens,
    )
    if not llm.tokenizer.has_template:
        raise EdgeLLMError(
            "the model has no chat template, so it cannot chat",
            hint='llm_inference continues texts: "apply_chat_template": false in its file',
        )
    settings = Settings(sampling, flags.max_generate_length, flags.enable_thinking)
    conversation = Conversation(llm=llm, settings=settings, system=flags.system)
    raise typer.Exit(1 if run(conversation, _screen(conversation, flags.history_file)) else 0)


def _screen(conversation: Conversation, history_file: Path | None) -> Screen:
    """Return a `Terminal` if standard input and output are terminals, else a `Pipe`."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        from edgellm.tools.chat.pipe import Pipe

        return Pipe()
    from rich.console import Console

    from edgellm.tools.chat.statistics import context
    from edgellm.tools.chat.terminal import Terminal

    def footer() -> str:
        latest, used = conversation.totals.latest, conversation.context_tokens
        sizes = context(used, conversation.llm.manifest)
        return f"{latest} · {sizes}" if latest else sizes

    console = Console(highlight=False, markup=False)
    terminal = Terminal(_history(history_file), footer, console)
    decoder = conversation.llm.manifest.decoder
    terminal.show(
        f"{decoder.model_type}, {decoder.num_parameters / 1e6:.1f} M parameters; "
        "/help lists commands, Alt-Enter begins another line, Ctrl-D leaves"
    )
    return terminal


def _history(path: Path | None) -> History:
    """Return the history of a file that only its owner can read; without one, of the default."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from edgellm.core.artifact import check_output_file

    place = path or _state_folder() / "chat_history"
    try:
        if path is None:
            place.parent.mkdir(parents=True, exist_ok=True)
        check_output_file(place)
        place.touch(mode=0o600)
    except (OSError, EdgeLLMError):
        if path is not None:
            raise
        return InMemoryHistory()  # the home folder is read-only
    return FileHistory(str(place))


def _state_folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "edgellm"


def main() -> None:
    """Entry point."""
    run_command(app, second_ends=False)
