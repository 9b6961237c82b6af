"""The model that a subcommand is for, and how its engine is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from edgellm.core.cli import App, with_flags
from edgellm.core.errors import EdgeLLMError
from edgellm.tools.store.store import Recipe

if TYPE_CHECKING:
    from edgellm.tools.store.prepare import Prepared

DOWNLOADS_KEPT = "what was downloaded is kept"
_Result = TypeVar("_Result")
_QUANTIZE, _DEVICES = ("none", "int8", "int4"), ("cpu", "cuda")

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Name the model: a checkpoint folder, a .gguf file, a hub id (owner/model or "
        "owner/model:Q4_K_M), a bundle, an engine, or a stored name.",
        rich_help_panel="Model",
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        "--draft",
        help="Speculate with this draft: a folder or hub id; none decodes plainly. auto takes "
        "a trained draft that fits, else n-grams.",
        rich_help_panel="Speculation",
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        "--quantize",
        help="Round float weights: none, int8 or int4. Default: none, or int4 if they do not "
        "fit into memory.",
        rich_help_panel="Model",
    ),
]
Fast = Annotated[
    bool,
    typer.Option(
        "--fast", help="Round float weights to 4 bits, as --quantize int4.", rich_help_panel="Model"
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        min=16,
        help="Reserve this many tokens for prompt and output together. Default: 8192, or fewer "
        "if the model or the memory has fewer.",
        rich_help_panel="Limits",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Run on this device: cpu or cuda. Default: the fastest that works here.",
        rich_help_panel="Model",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeFlags:
    """Flags of how an engine is made."""

    draft: Draft = "auto"
    quantize: Quantize = None
    fast: Fast = False
    context: Context = None
    device: Device = None

    def read(self) -> Recipe:
        """The recipe.

        Raises:
            EdgeLLMError: unknown values, or contradictory flags.
        """
        for flag, value, known in (
            ("--quantize", self.quantize, _QUANTIZE),
            ("--device", self.device, _DEVICES),
        ):
            if value is not None and value not in known:
                raise EdgeLLMError(f"{flag} {value}: give {', '.join(known[:-1])} or {known[-1]}")
        if self.fast and self.quantize not in (None, "int4"):
            raise EdgeLLMError(
                f"--fast rounds to 4 bits, --quantize {self.quantize} does not",
                hint="give one of them",
            )
        return Recipe(
            quantize="int4" if self.fast else self.quantize,
            context=self.context,
            device=self.device,
            draft=self.draft,
        )


with_recipe_flags = with_flags("recipe_flags", RecipeFlags)


def use_model(
    app: App, model: str, flags: RecipeFlags, action: Callable[[Prepared], _Result]
) -> _Result:
    """Run an action on a model's engine, see `edgellm.tools.store.prepare.use`.

    An interrupt before the action prints the command that goes on.
    """
    from edgellm.tools.store.prepare import use

    def start(found: Prepared) -> _Result:
        app.kept = ""
        return action(found)

    app.kept = DOWNLOADS_KEPT
    return use(model, flags.read(), start)
