"""Scripted times of forward passes without a GPU: times of the host would be noise.

They decide which sequences share a pass, and how much is drafted.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from edgellm.core import manifest
from edgellm.core.graph_roles import HOST, PASS, ROLES, shared_kind
from edgellm.core.manifest import Engine, Manifest

_BASE_MS, _DRAFT_MS = {"1": 5.0, "64": 8.0}, {"1": 0.5, "64": 0.8}


def script_costs(patch: pytest.MonkeyPatch, answers: int = 0) -> None:
    """Give engines that are loaded from now on scripted costs, so that none are measured.

    `answers`: the batch size of these engines; 0: their own.
    """
    load = manifest.load_manifest

    def scripted(folder: Path, expected: str, form: type[Manifest]) -> Manifest:
        found = load(folder, expected, form)
        if not isinstance(found, Engine):
            return found
        maximum = answers or found.max_batch_size
        return dataclasses.replace(found, max_batch_size=maximum, cost_ms=_costs(found, maximum))

    patch.setattr(manifest, "load_manifest", scripted)


def _costs(engine: Engine, answers: int) -> dict[str, dict[str, float]]:
    """Costs of single sequences and, for engines with a larger batch size, of batches."""
    kinds = {kind for role in engine.graphs for kind in ROLES[role].measured} - {HOST}
    costs = {kind: _BASE_MS if kind == PASS else _DRAFT_MS for kind in kinds}
    counts = (1, answers) if answers > 1 else ()
    shared = {shared_kind(kind, count): costs[kind] for kind in kinds for count in counts}
    return costs | shared
