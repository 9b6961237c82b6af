"""Versions of the devices of a fleet, as a table and a page."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from edgellm.core.artifact import replace_file
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import MANIFEST_NAME, FileRecord
from edgellm.tools.tables import Table, markdown
from edgellm.tools.transfer import scripts
from edgellm.tools.transfer.file_list import FileList, listing, version_of
from edgellm.tools.transfer.target import Target, connected, run_script

_SHOWN = 12  # digits of a version
NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Version:
    """The artifact in a target's folder."""

    target: Target
    version: str = NOTHING  # see `FileList.version`
    what: str = ""  # kind, model and quantization
    files: FileList | None = None  # without a local `folder`; None without a manifest
    has_previous: bool = False  # whether it can be rolled back
    fault: str = ""


def read_version(target: Target) -> Version:
    """Read the version of a connected target; only manifests are hashed.

    Raises:
        EdgeLLMError: the target cannot be reached.
    """
    printed = run_script(target, scripts.versions(target.folder, target.previous))
    first, *manifests = printed.split(f"\n{scripts.MANIFEST_MARK}\n")
    has_previous = first.strip() == "kept"
    files: dict[str, FileRecord] = {}
    kinds: dict[str, str] = {}
    hashes: list[str] = []
    what = ""
    for chunk in manifests:
        path, line, text = chunk.split("\n", 2)
        kind, listed = listing(text)
        if not kind:
            return Version(target, has_previous=has_previous, fault=f"{path} is damaged")
        prefix = path.removesuffix(MANIFEST_NAME)
        files |= {prefix + name: record for name, record in listed.items()}
        files[path] = FileRecord(len(text.encode()), line.split()[0])
        kinds[path] = kind
        hashes.append(line.split()[0])
        what = what or _what(kind, text)
    if not hashes:
        return Version(target, has_previous=has_previous)
    found = FileList(folder=Path(), files=files, kinds=kinds)
    return Version(target, version_of(hashes), what, found, has_previous)


def read_versions(target: Target) -> Version:
    """Connect and read the version; a fault becomes part of the result."""
    try:
        with connected(target) as remote:
            return read_version(remote)
    except EdgeLLMError as error:
        return Version(target, "unknown", fault=str(error))


def table(found: Sequence[Version], wanted: FileList | None) -> Table:
    """Return a table with one row per device.

    Args:
        found: the devices' versions.
        wanted: expected version; other versions are marked. None: the most frequent version.
    """
    names = [one.version for one in found]
    best = wanted.version if wanted is not None else max(names, key=names.count)
    rows = tuple(
        (
            str(one.target),
            one.version[:_SHOWN],
            one.what,
            one.fault or ("" if one.version == best else "other version"),
            "kept" if one.has_previous else "",
        )
        for one in found
    )
    num = sum(one.version == best and not one.fault for one in found)
    note = f"{num} of {len(found)} have {best[:_SHOWN]}" + (
        "" if wanted is None else f", which is {wanted.folder}"
    )
    columns = ("device", "version", "artifact", "state", "earlier version")
    return Table(title="Versions", columns=columns, rows=rows, note=note, is_numeric=False)


def write_page(path: Path, shown: Table) -> None:
    """Write the table as HTML or Markdown, by the suffix.

    Raises:
        EdgeLLMError: the suffix is neither.
    """
    now = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
    replace_file(path, _html(shown, now) if is_html(path) else f"{markdown(shown)}\n{now}\n")


def is_html(path: Path) -> bool:
    """Return whether a page's suffix is HTML's; raise `EdgeLLMError` if it is not Markdown's."""
    if path.suffix not in (".html", ".md"):
        raise EdgeLLMError(f"--page {path}", hint="give the name of a .html or an .md file")
    return path.suffix == ".html"


def _html(shown: Table, now: str) -> str:
    def row(kind: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + "</tr>"

    body = "\n".join(row("td", cells) for cells in shown.rows)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(shown.title)}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem; }}
table {{ border-collapse: collapse; }} td, th {{ padding: .3rem 1rem .3rem 0; text-align: left; }}
tr {{ border-bottom: 1px solid #8884; }} :root {{ color-scheme: light dark; }}
</style></head><body><h1>{html.escape(shown.title)}</h1>
<p>{html.escape(shown.note)}; {now}</p>
<table><thead>{row("th", shown.columns)}</thead><tbody>
{body}
</tbody></table></body></html>
"""


def _what(kind: str, manifest: str) -> str:
    """Describe the artifact of a manifest that `listing` could read."""
    raw: dict[str, Any] = json.loads(manifest)
    spec = raw.get("spec")
    spec = spec if isinstance(spec, dict) else {}
    inner = spec.get("decoder")
    model = spec.get("model_type") or (inner.get("model_type") if isinstance(inner, dict) else "")
    words = [kind.replace("_", " "), model, raw.get("dtype") or raw.get("backend")]
    words += [raw.get("quantization")] if raw.get("quantization") != "none" else []
    return " ".join(str(word) for word in words if word)
