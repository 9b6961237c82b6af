"""Help of a command: flags in groups, each with its default, then worked examples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

COMMON, REST = "Common", "Help"
GROUPS = (
    COMMON,
    "Model",
    "Input",
    "Output",
    "Limits",
    "Speculation",
    "Sampling",
    "Training",
    "Server",
    "Debug",
    REST,
)
_NONE = (None, "", float("inf"))


def describe(parameter: Any) -> str:
    """The help of a flag, its limits and its default, as sentences.

    A help may name the default itself, as in "Default: {default} tokens."; this text gets the
    value of the code in place of `{default}`.
    """
    text = (parameter.help or "").replace("{default}", _shown(parameter.default))
    about, given, default = text.partition("Default: ")
    ending = given + default
    if not given and parameter.required:
        ending = "Required."
    elif not given and parameter.default not in _NONE:
        ending = f"Default: {_shown(parameter.default)}."
    return " ".join(part for part in (about.strip(), _limits(parameter), ending) if part)


def group_flags(
    command: Any, context: Any, common: Iterable[str]
) -> dict[str, list[tuple[str, str]]]:
    """Flags and their help by group; those of `common` are first, in its order."""
    order = list(common)
    groups: dict[str, list[tuple[str, str]]] = {name: [] for name in GROUPS}
    places: list[tuple[int, str, tuple[str, str]]] = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None:
            continue
        names = [name for name in (*parameter.opts, parameter.name) if name in order]
        group = COMMON if names else getattr(parameter, "rich_help_panel", None) or REST
        text = record[1] if parameter.name == "help" else describe(parameter)
        places.append((order.index(names[0]) if names else 0, group, (record[0], text)))
    for _, group, row in sorted(places, key=lambda place: place[0]):
        groups.setdefault(group, []).append(row)
    return {name: rows for name, rows in groups.items() if rows}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _limits(parameter: Any) -> str:
    """Limits of a number; a lower limit of 0 alone is not worth a sentence."""
    kind = getattr(parameter, "type", None)
    low, high = (getattr(parameter, name, getattr(kind, name, None)) for name in ("min", "max"))
    if low is not None and high is not None:
        return f"From {_shown(low)} to {_shown(high)}."
    if high is not None:
        return f"At most {_shown(high)}."
    return f"At least {_shown(low)}." if low else ""
