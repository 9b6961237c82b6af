"""Graphs of a base and its draft as TensorRT gets them, opened on the fake GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from eagle_engines import CAPACITY, INPUT, TREE, EaglePair
from fake_gpu import FakeDevice, FakeEngine
from scripted_costs import script_costs

from edgellm.build.engine import build_engine
from edgellm.build.lowering.lora import Places, engine_options
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.plan import Plan
from edgellm.build.tensorrt.lowering.downgrade_ops import adapt
from edgellm.build.tensorrt.lowering.kernel_attention import Kernels
from edgellm.build.tensorrt.lowering.lower import lower
from edgellm.build.tensorrt.lowering.op_table import Version
from edgellm.build.tensorrt.profiles import in_chunks, passes_of
from edgellm.core.graph_roles import COMMIT, DECODER, DRAFT, FUSE, HEADS
from edgellm.core.manifest import (
    DRAFT_BUNDLE,
    DRAFT_ENGINE,
    DRAFT_FOLDER,
    LLM_BUNDLE,
    LLM_ENGINE,
    Bundle,
    Engine,
    GraphSpec,
    load_bundle,
    load_engine,
    with_kv_dtype,
)
from edgellm.device_runtime.networks.decoder import DecoderNetwork, network, open_decoder
from edgellm.device_runtime.networks.draft import DraftNetwork
from edgellm.device_runtime.networks.heads import HeadsNetwork
from edgellm.device_runtime.runners import onnxruntime_cpu, tensorrt
from edgellm.device_runtime.runners.runner import Runner
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import ADDRESSED_SUFFIX
from edgellm.device_runtime.runners.tensorrt.kernel_cache import KV_DTYPES
from edgellm.device_runtime.runners.tensorrt.library.trt_import import RTX_TAKES
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

PLAN = Plan(
    max_input_len=INPUT,
    kv_capacity=CAPACITY,
    threads=1,
    prefill="auto",
    max_verify_tree_size=TREE,
    max_draft_tree_size=TREE,
)
CANDIDATES = 40


def compiled(artifact: Bundle | Engine) -> dict[str, Any]:
    """Graphs by role that TensorRT compiles: edgellm's kernels commit."""
    return {role: graph for role, graph in artifact.graphs.items() if role != COMMIT}


class Lowered:
    """The graphs of a pair as TensorRT gets them, and the manifests of such engines."""

    def __init__(
        self,
        pair: EaglePair,
        folder: Path,
        version: Version = (11, 4),
        codes: str = "",
        answers: int = 1,
        adapter_rank: int = 0,
    ) -> None:
        """`codes`: of the cache, where edgellm's kernels compute; else "", of float32."""
        plan = dataclasses.replace(PLAN, max_batch_size=answers, max_lora_rank=adapter_rank)
        self._folder, self._version = folder, version
        bundles = {
            LLM_ENGINE: load_bundle(pair.bundle, LLM_BUNDLE),
            DRAFT_ENGINE: load_bundle(pair.draft_bundle, DRAFT_BUNDLE),
        }
        for source, bundle in zip((pair.bundle, pair.draft_bundle), bundles.values(), strict=True):
            for role, graph in compiled(bundle).items():
                candidates = 0 if role == DECODER else CANDIDATES
                kernels = (
                    Kernels(sm=110, codes=codes, sequences=answers)
                    if codes and role != FUSE
                    else None
                )
                dtype = ir.DataType.FLOAT16 if codes else ir.DataType.FLOAT
                lower_for_gpu(
                    source / graph.path,
                    self.path(role),
                    candidates,
                    version,
                    dtype,
                    kernels,
                    places=Places.of(plan) if role == DECODER else None,
                )
        self._passes = {
            role: passes_of(role, bundle, plan)
            for bundle in bundles.values()
            for role in compiled(bundle)
        }
        base = load_engine(pair.engine, LLM_ENGINE)
        draft = load_engine(pair.engine / DRAFT_FOLDER, DRAFT_ENGINE)
        self.manifest = dataclasses.replace(
            base,
            graphs=self._graphs(base),
            prefill_rows=INPUT,
            max_batch_size=answers,
            options={**base.options, **engine_options(plan)},
        )
        self.draft_manifest = dataclasses.replace(
            draft,
            graphs=self._graphs(draft),
            max_batch_size=answers,
        )
        if codes:
            self.manifest, self.draft_manifest = (
                dataclasses.replace(each, spec=with_kv_dtype(each.spec, KV_DTYPES[codes]))
                for each in (self.manifest, self.draft_manifest)
            )

    def path(self, role: str) -> Path:
        return self._folder / f"{role}.onnx"

    def _graphs(self, engine: Engine) -> dict[str, tuple[GraphSpec, ...]]:
        return {
            role: tuple(GraphSpec(f"{role}.engine", p.max_rows, "fp32") for p in self._passes[role])
            for role in compiled(engine)
        }

    def runners(self, engine: Engine, device: FakeDevice) -> dict[str, Runner]:
        """Runners of one of the manifests."""
        return {
            role: tensorrt.runner_of(
                role, engine, FakeEngine(self.path(role), self._passes[role], device), device
            )
            for role in engine.graphs
        }

    def open(self, device: FakeDevice) -> DecoderNetwork:
        engine = self.manifest
        opened = self.runners(engine, device)
        return DecoderNetwork(
            runner=opened[DECODER], spec=engine.decoder, capacity=engine.max_kv_cache_capacity
        )

    def open_draft(self, device: FakeDevice) -> DraftNetwork:
        engine = self.draft_manifest
        opened, spec = self.runners(engine, device), engine.draft.decoder
        return DraftNetwork(
            runner=opened[DRAFT],
            fuse=opened.get(FUSE),
            spec=spec,
            capacity=engine.max_kv_cache_capacity,
        )

    def open_heads(self, device: FakeDevice) -> HeadsNetwork:
        return HeadsNetwork(self.runners(self.draft_manifest, device)[HEADS])

    def replace_engines(
        self,
        monkeypatch: pytest.MonkeyPatch,
        device: FakeDevice,
        of_draft: FakeDevice | None = None,
    ) -> None:
        """Let the pair's own engines run on the fake GPU from now on."""
        others = onnxruntime_cpu.open_engine

        def open_engine(folder: Path, engine: Engine) -> dict[str, Runner]:
            if engine.kind == LLM_ENGINE:
                return self.runners(self.manifest, device)
            if engine.kind == DRAFT_ENGINE:
                return self.runners(self.draft_manifest, of_draft or device)
            return others(folder, engine)

        open_with(monkeypatch, open_engine, self.manifest.max_batch_size)


class LoweredModel:
    """A bundle in float16, its CPU engine, and its graph as TensorRT gets it."""

    def __init__(self, checkpoint: Path, folder: Path, plan: Plan, codes: str = "fp16") -> None:
        """`codes`: of the cache, where edgellm's kernels compute; "": TensorRT-RTX's operators."""
        self._plan, self.has_kernels = plan, bool(codes)
        self.bundle, self.engine = folder / "bundle", folder / "engine"
        export_llm(open_checkpoint(str(checkpoint)), self.bundle, ExportOptions(dtype="fp16"))
        own = dataclasses.replace(plan, max_batch_size=1)
        build_engine("llm", self.bundle, self.engine, own, "onnxruntime", lambda _: None)
        self.graph, bundle = folder / "decoder.onnx", load_bundle(self.bundle, LLM_BUNDLE)
        lower_for_gpu(
            self.bundle / "model.onnx",
            self.graph,
            kernels=Kernels(sm=110, codes=codes, sequences=plan.max_batch_size) if codes else None,
            capacity=plan.kv_capacity,
        )
        self.passes = passes_of(DECODER, bundle, plan)
        self.manifest_of_cpu = engine = load_engine(self.engine, LLM_ENGINE)
        graphs = tuple(GraphSpec("decoder.engine", p.max_rows, "fp16") for p in self.passes)
        self.manifest = dataclasses.replace(
            engine,
            graphs={DECODER: graphs},
            spec=with_kv_dtype(engine.decoder, KV_DTYPES[codes or "fp16"]),
            prefill_rows=in_chunks(bundle, plan).max_input_len,
            max_batch_size=plan.max_batch_size,
        )

    def runners(self, device: FakeDevice, engine: Engine | None = None) -> dict[str, Runner]:
        """Runners, by default of its own manifest."""
        loaded, engine = FakeEngine(self.graph, self.passes, device), engine or self.manifest
        return {DECODER: tensorrt.runner_of(DECODER, engine, loaded, device)}

    def open(self, device: FakeDevice) -> DecoderNetwork:
        return network(self.runners(device), self.manifest.decoder, self._plan.kv_capacity)


def open_with(
    patch: pytest.MonkeyPatch,
    open_engine: Callable[[Path, Engine], dict[str, Runner]],
    answers: int = 0,
) -> None:
    """Engines of the CPU are opened so from now on, as those of a GPU; see `script_costs`."""
    patch.setattr(onnxruntime_cpu, "open_engine", open_engine)
    script_costs(patch, answers)


def lower_for_gpu(
    source: Path,
    target: Path,
    candidates: int = 0,
    version: Version = (11, 4),
    dtype: ir.DataType = ir.DataType.FLOAT16,
    kernels: Kernels | None = None,
    capacity: int = CAPACITY,
    places: Places | None = None,
) -> None:
    """A portable graph as TensorRT gets it."""
    model, weights = ir.load(source), WeightFile(target.with_suffix(".data"))
    addressed = target.with_suffix(ADDRESSED_SUFFIX)
    lower(model, weights, dtype, capacity, candidates, kernels, places, addressed)
    weights.close()
    adapt(model, version, ahead_of_time=kernels is None and version == RTX_TAKES)
    ir.save(model, target)


def require_equal_passes(model: LoweredModel, *, limit: float) -> None:
    """Compare a prompt, a token and a tree on the fake GPU with the CPU engine.

    `limit`: of differences, as a share of the largest logit.
    """
    sessions = model.open(FakeDevice()), open_decoder(model.engine, model.manifest_of_cpu)
    # Of a seed whose logits depend little on float16: with others, those of Qwen3-Next in
    # transformers differ by up to 0.18 as well.
    ids, write = np.random.default_rng(1).integers(9, 90, 60), 0
    mask = np.tril(np.ones((5, 5), np.bool_))
    mask[3, 2] = mask[4, 3] = False
    places = np.array([0, 1, 2, 2, 3])
    for rows in (41, 1, 5):
        outputs = np.arange(rows) if rows == 5 else np.array([rows - 1])
        tree = {"position_ids": write + places, "tree_mask": mask} if rows == 5 else {}
        given = ids[write : write + rows], write, outputs
        found, expected = (each.run(*given, **tree).logits.copy() for each in sessions)
        assert np.abs(found - expected).max() < limit * np.abs(expected).max()
        write += rows
