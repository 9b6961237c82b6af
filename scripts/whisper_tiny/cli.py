"""`python -m edgellm.scripts.whisper_tiny`: a speech model, and something to transcribe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgellm.core.cli import App
from edgellm.core.errors import EdgeLLMError
from edgellm.scripts.whisper_tiny import fetch

TEXT = (
    "Good morning, and welcome to the meeting. The weather is fine today. "
    "We will talk about the new computer. Please write down the important numbers."
)

app = App()


@app.command()
def whisper_tiny(
    speech: Annotated[
        Path | None,
        typer.Option(
            "--speech", help="WAV file to write: the text as English speech. Default: none."
        ),
    ] = None,
    text: Annotated[str, typer.Option("--text", help="What is said. Default: four sentences.")] = (
        TEXT
    ),
) -> None:
    """Fetch Whisper tiny.en unless it exists, and print its folder."""
    if speech is not None:
        if not speech.parent.is_dir():
            raise EdgeLLMError(f"{speech.parent} is no folder", hint="give a file in a folder")
        fetch.say(text, speech)
    print(fetch.model())
