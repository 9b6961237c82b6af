"""The screen of a chat: a terminal, or pipes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.core.commands.extras import require
from edgellm.core.errors import EdgeLLMError
from edgellm.core.resources import user_folder

if TYPE_CHECKING:
    from prompt_toolkit.history import History

    from edgellm.tools.chat.conversation import Conversation
    from edgellm.tools.chat.repl import Screen


def require_packages() -> None:
    """Raise `EdgeLLMError` if a package of the screen is missing, before the engine is loaded."""
    if _is_terminal():
        require("chat")


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def open_screen(conversation: Conversation, history_file: Path | None) -> Screen:
    """Return a `Terminal` if standard input and output are terminals, else a `Pipe`."""
    if not _is_terminal():
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

    try:
        place = path or _state_folder() / "chat_history"
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
    return user_folder("XDG_STATE_HOME", ".local", "state") / "edgellm"
