"""Checks whether a bundle can be built here, as `llm_build` and others do first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from edgellm.build.artifact_kinds import AUDIO, DRAFT, LLM, PRODUCTS, VISUAL, read_bundle
from edgellm.build.backends import choose, implied_library, options_of
from edgellm.build.plan import Plan, audio_plan, image_plan
from edgellm.build.resource_estimate import Prediction, predict
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import LLM_BUNDLE, MANIFEST_NAME, load_bundle
from edgellm.tools.doctor.checks import FAULT, NOTE, OK, Finding

_INPUT, _CAPACITY, _TREE = 1024, 4096, 60  # defaults of llm_build
_AUDIO_S = 120  # that of audio_build


def examine_bundle(bundle: Path, backend: str, target_sm: str) -> Iterator[Finding]:
    """Yield a finding per resource of a default build into a folder next to `bundle`."""
    try:
        prediction = _predict(bundle, backend, {"--gpu": target_sm or None})
    except EdgeLLMError as error:
        yield Finding(what=f"{bundle}", status=FAULT, found=str(error), remedy=error.hint)
        return
    origin = prediction.origin
    yield Finding(what="compiler", status=OK, found=f"{origin.version}, for {origin.machine}")
    for need in prediction.needs:
        yield Finding(
            what=need.what,
            status=FAULT if need.remedy else OK,
            found=need.found,
            remedy=need.remedy,
        )
    for note in prediction.estimate.notes:
        yield Finding(what="weights", status=NOTE, found=note)


def _predict(source: Path, backend: str, flags: dict[str, str | None]) -> Prediction:
    try:
        found = json.loads((source / MANIFEST_NAME).read_text("utf-8"))["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        found = LLM_BUNDLE
    product = next((name for name, each in PRODUCTS.items() if each.bundle == found), LLM)
    name = choose(implied_library(backend, "", flags["--gpu"] or ""), "")
    options = options_of(name, flags)
    if product == VISUAL:
        plan = image_plan(4, 1024, 512, 0, options=options)
    elif product == AUDIO:
        plan = audio_plan(_AUDIO_S, 0, options=options)
    else:
        longest = load_bundle(source, PRODUCTS[product].bundle).decoder.max_positions
        capacity = min(_CAPACITY, longest)
        tree = _TREE if product == DRAFT else 0
        longest_input = min(_INPUT, capacity)
        plan = Plan(
            max_input_len=longest_input,
            kv_capacity=capacity,
            threads=0,
            prefill="auto",
            max_draft_tree_size=tree,
            options=options,
        )
    bundle = read_bundle(product, source, plan)
    return predict(source, bundle, plan, name, source.absolute().parent / "engine")
