"""Linear layers that LoRA adapters may change: a file of the engine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edgellm.core.errors import BrokenArtifactError
from edgellm.core.strict_json import parse

# Options of an engine that takes adapters
MAX_LORA_RANK = "max_lora_rank"
MAX_LORAS = "max_loras"  # maximum adapters; without it there is no limit
FILE = "adapted_layers.json"


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A linear layer, by its name in the checkpoint; its index is its row of `ADAPTER_TABLE`."""

    name: str
    in_features: int
    out_features: int


def write_layers(engine: Path, layers: Iterable[AdaptedLayer]) -> None:
    """Write the layers into an engine's folder."""
    rows = [[layer.name, layer.in_features, layer.out_features] for layer in layers]
    text = ",\n".join(json.dumps(row) for row in rows)
    (engine / FILE).write_text(f"[\n{text}\n]\n", "utf-8")


def read_layers(engine: Path) -> list[AdaptedLayer]:
    """Read the layers; raises `BrokenArtifactError`."""
    path = engine / FILE
    try:
        return [AdaptedLayer(*row) for row in parse(path.read_text("utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise BrokenArtifactError(
            f"{path} is damaged: {error}", hint="build the engine again"
        ) from None
