"""JetPack releases by their Linux for Tegra version.

The table of `docs/tensorrt.md` has the same facts, with their sources.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JetPack:
    """A release of JetPack."""

    l4t: tuple[int, int]  # its first version of Linux for Tegra
    name: str
    boards: str
    tensorrt: str
    cuda: str
    python: str  # the system's
    runs: str  # what edgellm supports with its TensorRT
    remedy: str  # "": none needed


_CPU = "CPU engines only"
_CPU_BACKEND = "build with --backend onnxruntime"
_UPGRADE = f"flash JetPack 7.2, or {_CPU_BACKEND}"
RELEASES = (
    JetPack(
        (35, 1), "JetPack 5", "Xavier, Orin", "8.4 to 8.5", "11.4", "3.8",
        f"{_CPU}, with a Python of 3.10 or newer",
        f"on an Orin {_UPGRADE}; a Xavier gets no newer one: {_CPU_BACKEND}",
    ),
    JetPack((36, 2), "JetPack 6.0", "Orin", "8.6", "12.2", "3.10", _CPU, _UPGRADE),
    JetPack(
        (36, 4), "JetPack 6.1 or 6.2", "Orin", "10.3", "12.6", "3.10",
        "fp16, int8, int4; edgellm's attention by plugins in Python", "",
    ),
    JetPack(
        (38, 2), "JetPack 7.0 or 7.1", "Thor", "10.13", "13.0", "3.12",
        "all precisions that the GPU has; edgellm's attention", "",
    ),
    JetPack(
        (39, 2), "JetPack 7.2", "Orin, Thor", "10.16", "13.2", "3.12",
        "all precisions that the GPU has", "",
    ),
)  # fmt: skip


def l4t_version(nv_tegra_release: str) -> tuple[int, int] | None:
    """Parse "# R36 (release), REVISION: 4.3, ..."; None for any other text."""
    match = re.search(r"R(\d+)\b.*?REVISION:\s*(\d+)", nv_tegra_release)
    return (int(match[1]), int(match[2])) if match else None


def find(version: tuple[int, int]) -> JetPack | None:
    """Return the release with a version of Linux for Tegra; None before the first."""
    return next((each for each in reversed(RELEASES) if each.l4t <= version), None)
