"""Compiled kernels of TensorRT engines, from the files of `llm_build --layerReport`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgellm.core.errors import BrokenArtifactError
from edgellm.core.manifest import LAYER_REPORT, Engine
from edgellm.tools.inspection.report import Fusion, Fusions

_ATTEND = "attend"  # plugin of edgellm's attention


def fusions_of(folder: Path, manifest: Engine) -> tuple[Fusions, ...]:
    """Read the reports of all compiled graphs.

    Raises:
        BrokenArtifactError: a report cannot be read.
    """
    return tuple(_read(folder / name) for name in manifest.files if name.endswith(LAYER_REPORT))


def _read(path: Path) -> Fusions:
    try:
        content = json.loads(path.read_text("utf-8"))
        passes = tuple(_fusion(*each) for each in content["passes"].items())
        return Fusions(path.name.removesuffix(LAYER_REPORT), content["told_by"], passes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenArtifactError(
            f"{path} is not a report of layers ({error!r})", hint="build the engine again"
        ) from None


def _fusion(name: str, found: Mapping[str, Any]) -> Fusion:
    return Fusion(
        name=name,
        kernels=int(found["kernels"]),
        attention=_attention(found["fused_attentions"], found["plugins"]),
        products={str(kind): int(count) for kind, count in found["products"].items()},
        reformats=int(found["reformats"]),
        decoded_weights=int(found["decoded_weights"]),
    )


def _attention(fused: int, plugins: Mapping[str, int]) -> str:
    own = plugins.get(_ATTEND, 0)
    kinds = [(own, "edgellm's kernels"), (fused, "TensorRT's, fused")]
    return ", ".join(f"{count} {kind}" for count, kind in kinds if count) or "none in one kernel"
