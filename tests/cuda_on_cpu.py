"""Engines for ONNX Runtime's CUDA provider, whose graphs and sessions also run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edgellm.build.draft import build_draft
from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan, VisualPlan
from edgellm.build.visual import build_visual
from edgellm.contract import (
    DRAFT_FOLDER,
    DraftEngineManifest,
    EngineManifest,
    VisualEngineManifest,
    load_manifest,
)
from edgellm.device_runtime import runners
from edgellm.device_runtime.runners.onnxruntime_cuda import provider as cuda
from edgellm.device_runtime.session import DraftSession, Session, VisualSession

CUDA = "onnxruntime_cuda"


@contextmanager
def cuda_is_the_cpu() -> Iterator[None]:
    """Sessions of engines for CUDA open on the CPU, as nobody but a test may ask for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "require_cuda", lambda: "cpu")
        yield


def build_base(bundle: Path, engine: Path, plan: Plan) -> EngineManifest:
    return build_engine(bundle, engine, plan, CUDA, lambda _: None)


def build_its_draft(bundle: Path, engine: Path, plan: Plan) -> DraftEngineManifest:
    return build_draft(bundle, engine, plan, CUDA, lambda _: None)


def build_encoder(bundle: Path, engine: Path, plan: VisualPlan) -> VisualEngineManifest:
    return build_visual(bundle, engine, plan, CUDA, lambda _: None)


def open_base(engine: Path) -> Session:
    with cuda_is_the_cpu():
        manifest = load_manifest(engine, EngineManifest)
        return runners.find(manifest.backend).open_session(engine, manifest)


def open_draft(engine: Path) -> DraftSession:
    folder = engine / DRAFT_FOLDER
    with cuda_is_the_cpu():
        manifest = load_manifest(folder, DraftEngineManifest)
        return runners.find(manifest.backend).open_draft_session(folder, manifest)


def open_encoder(engine: Path) -> VisualSession:
    manifest = load_manifest(engine, VisualEngineManifest)
    with cuda_is_the_cpu():
        return runners.find(manifest.backend).open_visual_session(engine, manifest)
