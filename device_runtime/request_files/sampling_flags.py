"""Flags of sampling options, for requests that do not give them."""

from __future__ import annotations

from dataclasses import asdict, make_dataclass
from typing import Annotated, Any

import typer

from edgellm.core.cli import with_flags
from edgellm.device_runtime.sampling.params import OPTIONS, Option


def _flag(option: Option) -> tuple[str, Any, Any]:
    first, *rest = option.name.split("_")
    name = "--" + first + "".join(map(str.capitalize, rest))
    bounds: dict[str, Any] = {"min": option.bounds.get("ge"), "max": option.bounds.get("le")}
    if option.default is None:
        default = "a random seed, which the output reports"
    elif option.kind is bool:
        default = "off"
    else:
        default = f"the model's value, else {option.default:g}"
    about = f"{option.doc} Default: {default}."
    limits = bounds if option.kind is not bool else {}
    flag = typer.Option(name, help=about, rich_help_panel="Sampling", **limits)
    return option.name, Annotated[option.kind | None, flag], None


SamplingFlags = make_dataclass("SamplingFlags", map(_flag, OPTIONS.values()), frozen=True)
with_sampling_flags = with_flags("sampling_flags", SamplingFlags)


def given_flags(flags: Any) -> dict[str, Any]:
    """Values of the flags that the user gave, by option; `flags` is a `SamplingFlags`."""
    return {name: value for name, value in asdict(flags).items() if value is not None}
