"""docs/demo.svg, outputs of `make demo` coloured by origin: `edgellm.scripts.output_picture`.

It reads the files of the last demo.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.terminal_theme import MONOKAI
from rich.text import Text
from rich.tree import Tree

from edgellm.core.cli import App, run_command
from edgellm.core.errors import EdgeLLMError
from edgellm.scripts.smollm2 import cache_folder

PICTURE = Path(__file__).parents[1] / "docs" / "demo.svg"
_WIDTH = 96
_REQUESTS = 0, 3  # of demo_requests.json
_MAX_LINES = 4  # of an output
_ACCEPTED, _BASE, _REJECTED = "bold green", "white", "bright_black"
app = App()


@app.command()
def picture() -> None:
    """Draw docs/demo.svg from the outputs and trees of the last `make demo`."""
    folder = cache_folder() / "demo"
    if not (folder / "trees.json").exists():
        raise EdgeLLMError(f"{folder} holds no outputs", hint="run make demo first")
    plain, eagle, trees = (_read(folder / f"{name}.json") for name in ("plain", "eagle", "trees"))
    PICTURE.write_text(draw(plain["responses"], eagle["responses"], trees["requests"]), "utf-8")
    print(PICTURE)


def draw(
    plain: list[dict[str, Any]], eagle: list[dict[str, Any]], trees: list[dict[str, Any]]
) -> str:
    """Return an SVG of some outputs, and of the round with the most accepted tokens."""
    rounds = {request["request_idx"]: request["rounds"] for request in trees}
    console = Console(record=True, width=_WIDTH, file=io.StringIO(), color_system="truecolor")
    for index in _REQUESTS:
        question = eagle[index]["messages"][-1]["content"][0]["text"]
        console.print(f"\n  > {question}", highlight=False)
        console.print(Padding(_output(rounds[index]), (0, 4)))
        console.print(_figures(plain[index], eagle[index]))
    drafted = [one for one in rounds[_REQUESTS[-1]] if "path" in one]
    console.print("\n  One round: the draft proposes a tree, one forward pass verifies it.\n")
    console.print(Padding(_tree(max(drafted, key=lambda one: len(one["path"]))), (0, 4)))
    svg = console.export_svg(title="make demo: SmolLM2-135M-Instruct with EAGLE3", theme=MONOKAI)
    return re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)  # it links to other hosts


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


def _output(rounds: list[dict[str, Any]]) -> Text:
    output = Text()
    for one in rounds:
        *accepted, bonus = one["emitted"]
        output.append("".join(accepted), _ACCEPTED)
        output.append(bonus, _BASE)
    lines = output.split("\n")
    if len(lines) > _MAX_LINES:
        lines = [*lines[:_MAX_LINES], Text("...", _REJECTED)]
    return Text("\n").join(lines)


def _figures(plain: dict[str, Any], eagle: dict[str, Any]) -> Text:
    same = "the same output" if plain["output_text"] == eagle["output_text"] else "ANOTHER OUTPUT"
    passes = eagle["timings"]["spec_verify_count"] + 1
    return Text.assemble(
        f"  [{eagle['generated_token_count']} tokens in {passes} forward passes, those in ",
        ("green", _ACCEPTED),
        f" accepted; {same} as without]",
    )


def _tree(one: dict[str, Any]) -> Tree:
    nodes: list[Tree] = []
    for index, (token, parent) in enumerate(zip(one["tokens"], one["parents"], strict=True)):
        is_accepted = index in one["path"]
        style = _ACCEPTED if is_accepted else _REJECTED
        label = Text(repr(token), style if parent >= 0 else _BASE)
        if is_accepted and index == one["path"][-1]:
            label.append(f"   and the model adds {one['bonus']!r}", _BASE)
        nodes.append(
            nodes[parent].add(label) if parent >= 0 else Tree(label, guide_style=_REJECTED)
        )
    return nodes[0]


if __name__ == "__main__":
    run_command(app)
