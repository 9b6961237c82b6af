"""`edgellm-trees`: draft trees of a run as one self-contained HTML page."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from edgellm.core.artifact import check_output_file, replace_file
from edgellm.core.cli import App, run_command
from edgellm.core.errors import EdgeLLMError

PAGE = Path(__file__).with_name("trees.html")
_PLACE = "@DATA@"
_OF_A_TREE = ("tokens", "parents", "expected", "confidence", "path", "bonus")
_HINT = "give the file that llm_inference --eagle --treeOutputFile wrote"

app = App()


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Sums and means over the rounds of one request, or of all."""

    rounds: int  # rounds with a draft tree
    tokens: int  # generated
    acceptance_length: float  # tokens per round, bonus included
    expected_length: float  # the drafts' own estimate of it
    nodes: float  # verified per round, root included
    histogram: tuple[int, ...]  # rounds by number of accepted draft tokens


@app.command(
    common=("trees_file", "--output_file"),
    examples=(
        "edgellm-trees trees.json",
        "edgellm-trees trees.json --output_file page.html",
    ),
)
def trees(
    trees_file: Annotated[
        Path,
        typer.Argument(
            metavar="TREES.json",
            help="Read the trees from this file, which llm_inference --treeOutputFile wrote.",
            rich_help_panel="Model",
        ),
    ],
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output_file",
            help="Write the HTML page to this file. Default: TREES.html, beside the trees.",
            rich_help_panel="Output",
        ),
    ] = None,
) -> None:
    """Draw draft trees with drafted, accepted and rejected tokens."""
    output = output_file or trees_file.with_suffix(".html")
    content = read_trees(trees_file)
    check_output_file(output, trees_file)
    replace_file(output, render(content))
    summary = summarize(_all_rounds(content["requests"]))
    typer.echo(
        f"{output}: {len(content['requests'])} requests, {summary.rounds} rounds, "
        f"acceptance length {summary.acceptance_length:.2f}"
    )


def read_trees(path: Path) -> dict[str, Any]:
    """Read and validate a tree file.

    Raises:
        EdgeLLMError: the file is missing, invalid, or has no round with a draft tree.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise EdgeLLMError(f"no such file: {path}", hint=_HINT) from None
    except IsADirectoryError:
        raise EdgeLLMError(f"{path} is a folder", hint=_HINT) from None
    except (ValueError, RecursionError) as error:
        detail = str(error).splitlines()[0]
        raise EdgeLLMError(f"{path} is not valid JSON: {detail}", hint=_HINT) from None
    requests = content.get("requests") if isinstance(content, dict) else None
    if not isinstance(requests, list):
        raise EdgeLLMError(f"{path} holds no trees", hint=_HINT)
    for place, request in enumerate(requests):
        rounds = request.get("rounds") if isinstance(request, dict) else None
        if not isinstance(rounds, list):
            raise EdgeLLMError(f"{path}: request {place} has no list of rounds", hint=_HINT)
        for number, found in enumerate(rounds):
            if (fault := _fault(found)) is not None:
                raise EdgeLLMError(
                    f"{path}: round {number} of request {place} is not a round: {fault}", hint=_HINT
                )
    if not any("tokens" in found for found in _all_rounds(requests)):
        raise EdgeLLMError(
            f"{path} holds no round of speculation",
            hint="run llm_inference with --eagle and a --maxGenerateLength above 1",
        )
    return content


def _fault(found: Any) -> str | None:
    """Return why one round of the file is invalid, or None."""
    if not isinstance(found, dict) or not _is_texts(found.get("emitted")):
        return "it has no list of emitted tokens"
    if "tokens" not in found:
        return None
    absent = [name for name in _OF_A_TREE if name not in found]
    if absent:
        return f"it has no {absent[0]}"
    tokens, parents, path = found["tokens"], found["parents"], found["path"]
    if not _is_texts(tokens) or not tokens or not isinstance(found["bonus"], str):
        return "its tokens are not strings"
    size = len(tokens)
    chances = (found["expected"], found["confidence"])
    if not all(_is_list(values, size) and all(map(_is_number, values)) for values in chances):
        return f"expected and confidence are not {size} numbers each"
    topological = _is_list(parents, size) and parents[0] == -1 and all(map(_is_index, parents[1:]))
    if not topological or not all(above < at for at, above in enumerate(parents)):
        return "its parents do not make a tree"
    if not _is_list(path) or not path or path[0] != 0:
        return "its path does not start at the root"
    steps = itertools.pairwise(path)
    if not all(_is_index(node) and node < size and parents[node] == above for above, node in steps):
        return "its path leaves the tree"
    return None


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_list(value: Any, size: int | None = None) -> bool:
    return isinstance(value, list) and size in (None, len(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < 1e9  # false for NaN


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def _all_rounds(requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [found for request in requests for found in request["rounds"]]


def summarize(rounds: Sequence[dict[str, Any]]) -> Summary:
    """Summarize rounds; means are zero if no round has a tree."""
    drafted = [found for found in rounds if "tokens" in found]
    count = max(len(drafted), 1)
    accepted = [len(found["path"]) - 1 for found in drafted]
    return Summary(
        rounds=len(drafted),
        tokens=sum(len(found["emitted"]) for found in rounds),
        acceptance_length=sum(length + 1 for length in accepted) / count,
        expected_length=sum(sum(found["expected"][1:]) + 1 for found in drafted) / count,
        nodes=sum(len(found["tokens"]) for found in drafted) / count,
        histogram=tuple(accepted.count(length) for length in range(max(accepted, default=0) + 1)),
    )


def _label(request: dict[str, Any], place: int) -> int | str:
    """Index of a request, and of its output if there are several."""
    index, choice = request.get("request_idx", place), request.get("choice_idx")
    return index if choice is None else f"{index}.{choice}"


def render(content: dict[str, Any]) -> str:
    """Return the HTML page of a tree file's content, as returned by `read_trees`."""
    names = ("emitted", *_OF_A_TREE)
    requests = [
        {
            "index": _label(request, place),
            "summary": asdict(summarize(request["rounds"])),
            "rounds": [
                {name: found[name] for name in names if name in found}
                for found in request["rounds"]
            ],
        }
        for place, request in enumerate(content["requests"])
    ]
    data = {
        "input_file": str(content.get("input_file", "")),
        "summary": asdict(summarize(_all_rounds(content["requests"]))),
        "requests": requests,
    }
    # Escaped, so that no token can end the script element.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    before, after = PAGE.read_text("utf-8").split(_PLACE)
    return before + text + after


def main() -> None:
    """Entry point."""
    run_command(app)


if __name__ == "__main__":
    main()
