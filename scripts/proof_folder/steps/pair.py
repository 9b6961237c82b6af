"""The base and draft of `examples/` as engines, with the visual encoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan, image_plan
from edgellm.scripts.proof_folder.steps.outputs import silent

_MAX_NODES = 60  # of a draft tree, the default of llm_inference
_LIMITS = Plan(max_input_len=128, kv_capacity=256)
_IMAGE_TOKENS = (4, 64, 64)  # least, in a request, in an image
VISUAL = "visual"


def build_pair(base: Path, draft: Path, engine: Path, backend: str) -> None:
    """Build the engines of two bundles into a new folder."""
    plan = replace(_LIMITS, is_eagle_base=True, max_verify_tree_size=_MAX_NODES)
    build_engine("llm", base, engine, plan, backend, silent)
    of_draft = replace(_LIMITS, max_draft_tree_size=_MAX_NODES)
    build_engine("draft", draft, engine, of_draft, backend, silent)


def build_seeing(base: Path, visual: Path, folder: Path, backend: str) -> tuple[Path, Path]:
    """Build a base and its visual encoder into `folder`; return their engines."""
    engine, encoder = folder / "engine", folder / VISUAL
    build_engine("llm", base, engine, _LIMITS, backend, silent)
    build_engine("visual", visual, encoder, image_plan(*_IMAGE_TOKENS, 0), backend, silent)
    return engine, encoder
