"""Engines for ONNX Runtime's CUDA provider, whose graphs and sessions also run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.device_runtime.runners.onnxruntime_cuda import provider as cuda
from edgellm.device_runtime.sessions import draft, encoder
from edgellm.device_runtime.sessions.decoder import DecoderSession, open_decoder
from edgellm.device_runtime.sessions.draft import DraftSession
from edgellm.device_runtime.sessions.encoder import EncoderSession
from edgellm.manifest import (
    DRAFT_ENGINE,
    DRAFT_FOLDER,
    LLM_ENGINE,
    VISUAL_ENGINE,
    Engine,
    load_engine,
)

CUDA = "onnxruntime_cuda"


@contextmanager
def cuda_is_the_cpu() -> Iterator[None]:
    """Sessions of engines for CUDA open on the CPU, as nobody but a test may ask for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "require_cuda", lambda: "cpu")
        yield


def build_base(bundle: Path, engine: Path, plan: Plan) -> Engine:
    return build_engine("llm", bundle, engine, plan, CUDA, lambda _: None)


def build_its_draft(bundle: Path, engine: Path, plan: Plan) -> Engine:
    return build_engine("draft", bundle, engine, plan, CUDA, lambda _: None)


def build_encoder(bundle: Path, engine: Path, plan: Plan) -> Engine:
    return build_engine("visual", bundle, engine, plan, CUDA, lambda _: None)


def open_base(engine: Path) -> DecoderSession:
    with cuda_is_the_cpu():
        manifest = load_engine(engine, LLM_ENGINE)
        return open_decoder(engine, manifest)


def open_draft(engine: Path) -> DraftSession:
    folder = engine / DRAFT_FOLDER
    with cuda_is_the_cpu():
        manifest = load_engine(folder, DRAFT_ENGINE)
        return draft.open_draft(folder, manifest)


def open_encoder(engine: Path) -> EncoderSession:
    manifest = load_engine(engine, VISUAL_ENGINE)
    with cuda_is_the_cpu():
        return encoder.open_encoder(engine, manifest)
