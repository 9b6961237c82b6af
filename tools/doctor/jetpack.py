"""JetPack by its Linux for Tegra, and the TensorRT that comes with it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JetPack:
    """A release."""

    l4t: tuple[int, int]  # the first of its Linux for Tegra
    name: str
    tensorrt: str
    runs: str  # what edgellm can do there with its own TensorRT


_TOO_OLD = "the CPU only: TensorRT has no caches that are updated in place before 10.15"
RELEASES = (
    JetPack((35, 1), "JetPack 5", "8.4 to 8.5", _TOO_OLD),
    JetPack((36, 2), "JetPack 6.0", "8.6", _TOO_OLD),
    JetPack((36, 4), "JetPack 6.1 or 6.2", "10.3", _TOO_OLD),
    JetPack((38, 2), "JetPack 7.0 or 7.1", "10.13", _TOO_OLD),
    JetPack((39, 2), "JetPack 7.2", "10.16.2", "all precisions that the GPU has"),
)


def l4t_version(nv_tegra_release: str) -> tuple[int, int] | None:
    """From "# R36 (release), REVISION: 4.3, ..."; None where it reads otherwise."""
    match = re.search(r"R(\d+)\b.*?REVISION:\s*(\d+)", nv_tegra_release)
    return (int(match[1]), int(match[2])) if match else None


def find(version: tuple[int, int]) -> JetPack | None:
    """The release of a Linux for Tegra; None before the first."""
    return next((each for each in reversed(RELEASES) if each.l4t <= version), None)
