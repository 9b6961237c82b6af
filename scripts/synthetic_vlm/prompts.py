"""`python -m edgellm.scripts.synthetic_vlm.prompts`: conversations for the training of a draft.

Each is a line of `prompts.jsonl`, without the last reply, which the base generates. Its pictures
are files in the same folder, as `edgellm-train-draft --data` reads them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from edgellm.core.artifact import move_files, temporary_folder
from edgellm.core.cli import App, run_command
from edgellm.core.errors import EdgeLLMError
from edgellm.scripts.synthetic_vlm.conversations import KINDS, Conversation, converse

PROMPTS = "prompts.jsonl"
_DRAFT = 2  # first number of the scenes' seeds; unused in the base's training and in tests

app = App()


@app.command()
def prompts(
    output_dir: Annotated[Path, typer.Option("--output_dir", help="A new folder.")],
    count: Annotated[int, typer.Option("--count", min=1, help="Number of conversations.")] = 4000,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
) -> None:
    """Write conversations about drawn scenes, half of them about one picture."""
    if output_dir.exists():
        raise EdgeLLMError(f"{output_dir} exists", hint="give another --output_dir")
    usual, *others = KINDS
    with temporary_folder(output_dir) as folder:
        with (folder / PROMPTS).open("w", encoding="utf-8") as stream:
            for number in range(count):
                kind = usual if number % 2 == 0 else others[number // 2 % len(others)]
                conversation = converse(kind, _DRAFT, seed, number)
                stream.write(json.dumps({"messages": _saved(conversation, folder, number)}) + "\n")
        move_files(folder, output_dir, sorted(path.name for path in folder.iterdir()), set())
    print(f"{output_dir / PROMPTS}: {count} conversations")


def _saved(conversation: Conversation, folder: Path, number: int) -> list[dict[str, Any]]:
    """Return the messages before the last reply, and write their pictures to `folder`."""
    names = iter(
        [(f"{number:05}-{at}.png", scene.image) for at, scene in enumerate(conversation.scenes)]
    )

    def item(content: dict[str, Any]) -> dict[str, Any]:
        if content["type"] != "image":
            return content
        name, image = next(names)
        image.save(folder / name)
        return {**content, "image": name}

    return [
        message
        if isinstance(message["content"], str)
        else {**message, "content": [item(content) for content in message["content"]]}
        for message in conversation.messages[:-1]
    ]


if __name__ == "__main__":
    run_command(app)
