"""`edgellm run`: chat with a model, or answer one prompt."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.core.cli import App
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.request_files.sampling_flags import given_flags, with_sampling_flags
from edgellm.tools.chat.flags import EnableThinking, System
from edgellm.tools.command.flags import Model, RecipeFlags, use_model, with_recipe_flags

if TYPE_CHECKING:
    from edgellm.tools.chat.conversation import Conversation
    from edgellm.tools.store.prepare import Prepared

# For models without sampling values of their own, as llama.cpp samples.
_USUAL = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}

app = App()

Prompt = Annotated[
    str | None,
    typer.Argument(
        metavar="[PROMPT]",
        help="Answer this prompt and end; text of standard input follows it. Default: a chat.",
        rich_help_panel="Model",
    ),
]
Images = Annotated[
    list[Path] | None,
    typer.Option(
        "--image",
        help="Show this image to a model that sees; repeat it for more. Default: no image.",
        rich_help_panel="Model",
    ),
]
Clips = Annotated[
    list[Path] | None,
    typer.Option(
        "--audio",
        help="Give this audio to a model that takes it; repeat it for more. Default: no audio.",
        rich_help_panel="Model",
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option(
        "--maxTokens",
        min=1,
        help="Generate at most this many tokens for each message. Default: {default} tokens.",
        rich_help_panel="Limits",
    ),
]


@app.command(
    name="run",
    common=("model", "prompt", "--image", "--draft", "--fast"),
    examples=(
        "edgellm run HuggingFaceTB/SmolLM2-135M-Instruct 'What is the capital of France?'",
        "edgellm run model.gguf 'Summarise this.' --maxTokens 200",
    ),
)
@with_recipe_flags
@with_sampling_flags
def run(
    model: Model,
    sampling_flags: Any,
    recipe_flags: RecipeFlags,
    prompt: Prompt = None,
    images: Images = None,
    clips: Clips = None,
    system: System = "",
    max_tokens: MaxTokens = 1024,
    enable_thinking: EnableThinking = False,
) -> None:
    """Chat with a model, or answer one prompt."""
    text = _prompt(prompt)
    attached = {"image": images or (), "audio": clips or ()}
    for name, files in attached.items():
        _check_files(name, files, has_prompt=text is not None)

    def start(found: Prepared) -> Conversation:
        for name, encoder in (("image", found.visual), ("audio", found.audio)):
            if attached[name] and encoder is None:
                raise _without_encoder(found, name)
        return _open(found, sampling_flags, system, max_tokens, enable_thinking=enable_thinking)

    if text is None:
        from edgellm.tools.chat.screen import require_packages

        require_packages()
    conversation = use_model(app, model, recipe_flags, start)
    if text is None:
        from edgellm.tools.chat.repl import run as chat
        from edgellm.tools.chat.screen import open_screen

        raise typer.Exit(1 if chat(conversation, open_screen(conversation, None)) else 0)
    for image in images or ():
        conversation.attach(image)
    for clip in clips or ():
        conversation.attach_audio(clip)
    _answer(conversation, text)


def _check_files(name: str, files: Sequence[Path], *, has_prompt: bool) -> None:
    """Raise `EdgeLLMError` for attached files without a prompt, or missing ones."""
    if files and not has_prompt:
        raise EdgeLLMError(f"--{name} needs a prompt", hint=f"in a chat, /{name} FILE attaches one")
    for file in files:
        if not file.is_file():
            raise EdgeLLMError(f"--{name} {file}: no such file", hint="check the path")


def _without_encoder(found: Prepared, name: str) -> EdgeLLMError:
    """The error of a model that takes no attached files of this kind."""
    is_text = found.visual is None and found.audio is None
    verb = "sees" if name == "image" else "hears"
    return EdgeLLMError(
        f"{found.name} takes {'text only, ' if is_text else ''}no --{name}",
        hint=f"leave --{name} out, or give a checkpoint or hub id of a model that {verb}",
    )


def _prompt(given: str | None) -> str | None:
    """The prompt, followed by the text of standard input; None for a chat."""
    stdin = None if sys.stdin is None or sys.stdin.isatty() else sys.stdin
    if given is not None and stdin is not None and not _has_text():
        stdin = None
    if given is None and stdin is None:
        return None
    text = stdin.read().strip() if stdin else ""
    parts = [part for part in (given, text) if part and part.strip()]
    if not parts:
        empty = "standard input is empty" if given is None else "the prompt is empty"
        raise EdgeLLMError(empty, hint="give a prompt")
    return "\n\n".join(parts)


def _has_text() -> bool:
    """Whether standard input is a pipe or a file; services and jobs have others, never closed."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except OSError:  # not of this process
        return True
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _open(
    found: Prepared,
    sampling_flags: Any,
    system: str,
    max_tokens: int,
    *,
    enable_thinking: bool,
) -> Conversation:
    from edgellm.device_runtime.api.generation_request import GenerationDefaults
    from edgellm.device_runtime.api.llm import LLM
    from edgellm.device_runtime.speculate.options import AUTO, SpecOptions
    from edgellm.tools.chat.conversation import Conversation, Settings

    given = GenerationDefaults(sampling=given_flags(sampling_flags))  # checked before the load
    llm = LLM(
        found.engine,
        spec=SpecOptions(network=AUTO),
        multimodal_engine_dir=found.visual,
        audio_engine_dir=found.audio,
        context_reuse=True,
    )
    if not llm.tokenizer.has_template:
        raise EdgeLLMError(
            f"{found.name} has no chat template, so it cannot chat",
            hint=f"llm_inference --engineDir {found.engine} continues texts: "
            '"apply_chat_template": false in its file; or add the chat_template.jinja of the model '
            "to its folder",
        )
    usual = {} if llm.defaults.sampling else _USUAL
    sampling = llm.sampling_params(**{**usual, **given.sampling})
    settings = Settings(sampling, max_tokens, enable_thinking)
    return Conversation(llm=llm, settings=settings, system=system)


def _answer(conversation: Conversation, text: str) -> None:
    """Print the answer to one prompt."""
    from edgellm.tools.chat.pipe import Pipe

    output = conversation.ask(text)
    with Pipe().streaming(output) as show:
        for step in output:
            show(step.text)
    if output.finish_reason == "length":
        typer.echo(
            f"note: truncated after {len(output.token_ids)} tokens; --maxTokens sets the limit",
            err=True,
        )
