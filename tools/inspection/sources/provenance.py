"""Origin of an artifact, from manifests and reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgellm.core.artifact import hash_file
from edgellm.core.manifest import MANIFEST_NAME
from edgellm.tools.inspection.report import Origin

_QUANTIZED = "edgellm_quant.json"  # report of edgellm-quantize
_OF_BUNDLE = "bundle_"  # prefix of the bundle's provenance in an engine's


def of_engine(provenance: Mapping[str, Any]) -> tuple[Origin, ...]:
    """Return the bundle of an engine, and the bundle's own origin."""
    path, sha256 = str(provenance["bundle"]), str(provenance["bundle_manifest_sha256"])
    before = {
        key.removeprefix(_OF_BUNDLE): value
        for key, value in provenance.items()
        if key.startswith(_OF_BUNDLE) and key != "bundle_manifest_sha256"
    }
    manifest = Path(path) / MANIFEST_NAME
    if not manifest.is_file():
        state = "not here"
    else:
        state = "unchanged" if hash_file(manifest).sha256 == sha256 else "changed"
    own = Origin(
        what="bundle",
        path=path,
        state=state,
        details={"manifest sha256": sha256, **_versions(before)},
    )
    return own, *of_bundle(before)


def of_bundle(provenance: Mapping[str, Any]) -> tuple[Origin, ...]:
    """Return the checkpoint of a bundle, and the checkpoint's own origin."""
    links = of_checkpoint(str(provenance["checkpoint"]))
    base = provenance.get("base")  # a draft may use its embedding
    return (
        links
        if base is None
        else (*links, Origin(what="base", path=str(base), state=_state(str(base)), details={}))
    )


def of_checkpoint(path: str) -> tuple[Origin, ...]:
    """Return a checkpoint, and the one that edgellm-quantize quantized."""
    found = Origin(what="checkpoint", path=path, state=_state(path), details={})
    try:
        report = json.loads((Path(path) / _QUANTIZED).read_text("utf-8"))
        settings, versions, quality = (report[key] for key in ("settings", "versions", "quality"))
        details = {
            "quantized to": str(report["quantization"]),
            "with": ", ".join(f"{name} {number}" for name, number in versions.items()),
            "calibration": str(report["calibration"]["name"]),
            "perplexity": f"{quality['perplexity_float']:.3f} -> "
            f"{quality['perplexity_quantized']:.3f}",
        }
        source = str(settings["model_dir"])
    except (OSError, ValueError, KeyError, TypeError):
        return (found,)
    made = Origin(what=found.what, path=path, state=found.state, details=details)
    return made, Origin(what="checkpoint", path=source, state=_state(source), details={})


def _versions(provenance: Mapping[str, Any]) -> dict[str, str]:
    paths = ("checkpoint", "base", "bundle")
    return {key: str(value) for key, value in provenance.items() if key not in paths}


def _state(path: str) -> str:
    return "here" if Path(path).exists() else "not here"
