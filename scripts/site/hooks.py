"""Hooks of mkdocs: generated pages are added when the site is built."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from edgellm.scripts.site.errors import error_page
from edgellm.scripts.site.files import manifest_page, request_page
from edgellm.scripts.site.flags import command_page

ROOT = Path(__file__).resolve().parents[2]
_AT_THE_ROOT = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README as front page, and the reference."""
    pages = {name: _of_the_site(_read(source)) for name, source in _AT_THE_ROOT.items()}
    pages |= {
        "reference/commands.md": command_page(_read("pyproject.toml")),
        "reference/errors.md": error_page(ROOT),
        "reference/manifests.md": manifest_page(),
        "reference/requests.md": request_page(),
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def _read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def _of_the_site(text: str) -> str:
    """Convert links to files of the repository to those of the site."""
    for name, source in _AT_THE_ROOT.items():
        text = text.replace(f"({source})", f"({name})")
    return re.sub(r"\(docs/", "(", text)
