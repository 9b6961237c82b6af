"""Graphs of a base and its draft as TensorRT gets them, opened on the GPU that is not there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import onnx_ir as ir
import pytest
from eagle_engines import CAPACITY, INPUT, TREE, EaglePair
from fake_gpu import FakeDevice, FakeEngine

from edgellm.build.lowering.weights import WeightFile
from edgellm.build.plan import Plan
from edgellm.build.tensorrt.lower import lower_decoder, lower_graph
from edgellm.build.tensorrt.profiles import base_passes, draft_passes, heads_pass
from edgellm.contract import (
    DRAFT_FOLDER,
    DraftEngineManifest,
    EngineManifest,
    PassGraph,
    load_manifest,
)
from edgellm.device_runtime.runners import onnxruntime_cpu
from edgellm.device_runtime.runners.tensorrt.heads import TensorRtHeads
from edgellm.device_runtime.runners.tensorrt.session import TensorRtDraftSession, TensorRtSession

PLAN = Plan(INPUT, CAPACITY, 1, "auto", max_verify_tree_size=TREE, max_draft_tree_size=TREE)
CANDIDATES = 40


class Lowered:
    """The graphs in a folder, and the manifests of such engines."""

    def __init__(self, pair: EaglePair, folder: Path) -> None:
        self.base, self.draft, self.fuse = (folder / f"{n}.onnx" for n in ("base", "draft", "fuse"))
        _lower(pair.bundle / "model.onnx", self.base)
        _lower(pair.draft_bundle / "model.onnx", self.draft, CANDIDATES)
        if (pair.draft_bundle / "fuse.onnx").exists():
            _lower(pair.draft_bundle / "fuse.onnx", self.fuse, is_decoder=False)
        self.manifest = load_manifest(pair.engine, EngineManifest)
        graphs = tuple(PassGraph("llm.engine", p.max_rows, "fp32") for p in base_passes(PLAN))
        self.manifest = dataclasses.replace(
            self.manifest, graphs=graphs, pass_cost_ms={}, prefill_rows=INPUT
        )
        drafts = load_manifest(pair.engine / DRAFT_FOLDER, DraftEngineManifest)
        graphs = tuple(PassGraph("draft.engine", p.max_rows, "fp32") for p in draft_passes(PLAN))
        self.draft_manifest = dataclasses.replace(drafts, graphs=graphs)

    def open(self, device: FakeDevice) -> TensorRtSession:
        engine = FakeEngine(self.base, base_passes(PLAN), device)
        return TensorRtSession(engine, device, self.manifest)

    def open_draft(self, device: FakeDevice) -> TensorRtDraftSession:
        engine = FakeEngine(self.draft, draft_passes(PLAN), device)
        fuse = FakeEngine(self.fuse, draft_passes(PLAN), device)
        return TensorRtDraftSession(engine, fuse, device, self.draft_manifest)

    def open_heads(self, device: FakeDevice) -> TensorRtHeads:
        return TensorRtHeads(FakeEngine(self.draft, [heads_pass()], device), device)

    def replace_engines(self, monkeypatch: pytest.MonkeyPatch, device: FakeDevice) -> None:
        """Let the pair's own engine run on the fake GPU from now on."""
        monkeypatch.setattr(onnxruntime_cpu, "open_session", lambda *_: self.open(device))
        monkeypatch.setattr(
            onnxruntime_cpu, "open_draft_session", lambda *_: self.open_draft(device)
        )
        monkeypatch.setattr(onnxruntime_cpu, "open_heads", lambda *_: self.open_heads(device))


def _lower(source: Path, target: Path, candidates: int = 0, *, is_decoder: bool = True) -> None:
    model, weights = ir.load(source), WeightFile(target.with_suffix(".data"))
    if is_decoder:
        lower_decoder(model, CAPACITY, weights, ir.DataType.FLOAT, candidates)
    else:
        lower_graph(model, weights, ir.DataType.FLOAT)
    weights.close()
    ir.save(model, target)
