"""Self-contained HTML pages without scripts and network access, from Jinja templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_SHELL = Path(__file__).parent


def render(template: Path, **values: Any) -> str:
    """Return a page.

    Args:
        template: extends `base.html` of this folder; `tables.html` has its macros.
        values: of the template; text is escaped, `Markup` is not.
    """
    folders = FileSystemLoader([template.parent, _SHELL])
    environment = Environment(
        loader=folders,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name).render(**values)
