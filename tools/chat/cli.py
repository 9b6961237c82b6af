"""`edgellm-chat`: chat with an engine."""

from __future__ import annotations

from typing import Any

import typer

from edgellm.core.cli import App, run_command
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.request_files.sampling_flags import given_flags, with_sampling_flags
from edgellm.device_runtime.request_files.spec_flags import SpecFlags, with_spec_flags
from edgellm.tools.chat.flags import ChatFlags, with_chat_flags

_MAX_GENERATE_LENGTH = 512  # if the flags and the model give none

app = App()


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
    from edgellm.device_runtime.api.generation_request import GenerationDefaults
    from edgellm.device_runtime.api.llm import LLM
    from edgellm.tools.chat.conversation import Conversation, Settings
    from edgellm.tools.chat.repl import run
    from edgellm.tools.chat.screen import open_screen, require_packages

    require_packages()
    given = GenerationDefaults(sampling=given_flags(sampling_flags))  # checked before the load
    llm = LLM(
        flags.engine_dir,
        verify=flags.verify,
        spec=spec_flags.read(),
        multimodal_engine_dir=flags.multimodal_engine_dir,
        audio_engine_dir=flags.audio_engine_dir,
        context_reuse=True,
        allow_special_tokens=flags.allow_special_tokens,
    )
    if not llm.tokenizer.has_template:
        raise EdgeLLMError(
            "the model has no chat template, so it cannot chat",
            hint='llm_inference continues texts: "apply_chat_template": false in its file; or add '
            "the chat_template.jinja of the model to its folder and export it again",
        )
    sampling = llm.sampling_params(**given.sampling)
    length = flags.max_generate_length or llm.defaults.max_generate_length
    settings = Settings(sampling, length or _MAX_GENERATE_LENGTH, flags.enable_thinking)
    conversation = Conversation(llm=llm, settings=settings, system=flags.system)
    raise typer.Exit(1 if run(conversation, open_screen(conversation, flags.history_file)) else 0)


def main() -> None:
    """Entry point."""
    run_command(app, second_ends=False)
