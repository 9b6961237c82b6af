"""JetPack releases by their Linux for Tegra version.

The table of `docs/tensorrt.md` has the same facts, with their sources.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
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
        l4t=(35, 1),
        name="JetPack 5",
        boards="Xavier, Orin",
        tensorrt="8.4 to 8.5",
        cuda="11.4",
        python="3.8",
        runs=f"{_CPU}, with a Python of 3.10 or newer",
        remedy=f"on an Orin {_UPGRADE}; a Xavier gets no newer one: {_CPU_BACKEND}",
    ),
    JetPack(
        l4t=(36, 2),
        name="JetPack 6.0",
        boards="Orin",
        tensorrt="8.6",
        cuda="12.2",
        python="3.10",
        runs=_CPU,
        remedy=_UPGRADE,
    ),
    JetPack(
        l4t=(36, 4),
        name="JetPack 6.1 or 6.2",
        boards="Orin",
        tensorrt="10.3",
        cuda="12.6",
        python="3.10",
        runs="fp16, int8, int4; edgellm's attention by plugins in Python",
        remedy="",
    ),
    JetPack(
        l4t=(38, 2),
        name="JetPack 7.0 or 7.1",
        boards="Thor",
        tensorrt="10.13",
        cuda="13.0",
        python="3.12",
        runs="all precisions that the GPU has; edgellm's attention",
        remedy="",
    ),
    JetPack(
        l4t=(39, 2),
        name="JetPack 7.2",
        boards="Orin, Thor",
        tensorrt="10.16",
        cuda="13.2",
        python="3.12",
        runs="all precisions that the GPU has",
        remedy="",
    ),
)


def l4t_version(nv_tegra_release: str) -> tuple[int, int] | None:
    """Parse "# R36 (release), REVISION: 4.3, ..."; None for any other text."""
    match = re.search(r"R(\d+)\b.*?REVISION:\s*(\d+)", nv_tegra_release)
    return (int(match[1]), int(match[2])) if match else None


def find(version: tuple[int, int]) -> JetPack | None:
    """Return the release with a version of Linux for Tegra; None before the first."""
    return next((each for each in reversed(RELEASES) if each.l4t <= version), None)
