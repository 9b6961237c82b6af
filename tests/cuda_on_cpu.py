"""Engines for ONNX Runtime's CUDA provider, whose graphs and sessions also run on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edgellm.build.draft import build_draft
from edgellm.build.engine import build_engine
from edgellm.build.visual import build_visual
from edgellm.contract import (
    DRAFT_FOLDER,
    DraftEngineManifest,
    EngineManifest,
    VisualEngineManifest,
    load_manifest,
)
from edgellm.device_runtime.backends import CompilerOptions, Plan, VisualPlan, onnxruntime
from edgellm.device_runtime.backends.onnxruntime import cuda
from edgellm.device_runtime.session import DraftSession, Session, VisualSession

CUDA = CompilerOptions(device="cuda")


@contextmanager
def cuda_is_the_cpu() -> Iterator[None]:
    """Sessions of engines for CUDA open on the CPU, as nobody but a test may ask for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "require_cuda", lambda: "cpu")
        yield


def build_base(bundle: Path, engine: Path, plan: Plan) -> EngineManifest:
    plan = dataclasses.replace(plan, compiler=CUDA)
    return build_engine(bundle, engine, plan, "onnxruntime", lambda _: None)


def build_its_draft(bundle: Path, engine: Path, plan: Plan) -> DraftEngineManifest:
    plan = dataclasses.replace(plan, compiler=CUDA)
    return build_draft(bundle, engine, plan, "onnxruntime", lambda _: None)


def build_encoder(bundle: Path, engine: Path, plan: VisualPlan) -> VisualEngineManifest:
    plan = dataclasses.replace(plan, compiler=CUDA)
    return build_visual(bundle, engine, plan, "onnxruntime", lambda _: None)


def open_base(engine: Path) -> Session:
    with cuda_is_the_cpu():
        return onnxruntime.open_session(engine, load_manifest(engine, EngineManifest))


def open_draft(engine: Path) -> DraftSession:
    folder = engine / DRAFT_FOLDER
    with cuda_is_the_cpu():
        return onnxruntime.open_draft_session(folder, load_manifest(folder, DraftEngineManifest))


def open_encoder(engine: Path) -> VisualSession:
    manifest = load_manifest(engine, VisualEngineManifest)
    with cuda_is_the_cpu():
        return onnxruntime.open_visual_session(engine, manifest)
