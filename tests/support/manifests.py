"""Changed manifests, as an older edgellm would have written them: without a checksum."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgellm.core.manifest import MANIFEST_NAME


def read_manifest(folder: Path) -> dict[str, Any]:
    """The content of an artifact's manifest, without its checksum."""
    raw = json.loads((folder / MANIFEST_NAME).read_text("utf-8"))
    raw.pop("manifest_sha256", None)
    return raw


def write_manifest(folder: Path, raw: dict[str, Any]) -> None:
    """Replace an artifact's manifest."""
    (folder / MANIFEST_NAME).write_text(json.dumps(raw), "utf-8")
