"""Whether a bundle can be built here: what `llm_build` and `visual_build` ask first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from edgellm.build.engine import read_bundle, read_draft_bundle
from edgellm.build.fit import Prediction, predict
from edgellm.build.plan import CompilerOptions, Plan, VisualPlan
from edgellm.build.visual import read_visual_bundle
from edgellm.contract import (
    MANIFEST_NAME,
    BundleManifest,
    DraftBundleManifest,
    EdgeLLMError,
    load_manifest,
)
from edgellm.tools.doctor.checks import FAULT, OK, Finding

_LLM, _DRAFT, _VISUAL = "llm_bundle", "draft_bundle", "visual_bundle"
_INPUT, _CAPACITY, _TREE = 1024, 4096, 60  # llm_build's own


def examine_bundle(bundle: Path, backend: str, target_sm: str) -> Iterator[Finding]:
    """A finding for each need of a build with usual lengths into a folder beside `bundle`."""
    try:
        prediction = _predict(bundle, backend, CompilerOptions(target_sm))
    except EdgeLLMError as error:
        yield Finding(f"{bundle}", FAULT, str(error), error.hint)
        return
    origin = prediction.origin
    yield Finding("compiler", OK, f"{origin.version}, for {origin.machine}")
    for need in prediction.needs:
        yield Finding(need.what, FAULT if need.remedy else OK, need.found, need.remedy)


def _predict(bundle: Path, backend: str, options: CompilerOptions) -> Prediction:
    try:
        kind = json.loads((bundle / MANIFEST_NAME).read_text("utf-8"))["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        kind = _LLM
    engine = bundle.absolute().parent / "engine"
    if kind == _VISUAL:
        visual_plan = VisualPlan(4, 1024, 512, 0, compiler=options)
        visual = read_visual_bundle(bundle, visual_plan)
        return predict(bundle, visual, visual_plan, backend, engine)
    if kind == _DRAFT:
        manifest = load_manifest(bundle, DraftBundleManifest)
        longest, tree = manifest.draft.decoder.max_positions, _TREE
    else:
        manifest = load_manifest(bundle, BundleManifest)
        longest, tree = manifest.decoder.max_positions, 0
    capacity = min(_CAPACITY, longest)
    rows = min(_INPUT, capacity)
    plan = Plan(rows, capacity, 0, "auto", max_draft_tree_size=tree, compiler=options)
    manifest = (read_draft_bundle if kind == _DRAFT else read_bundle)(bundle, plan)
    return predict(bundle, manifest, plan, backend, engine)
