"""Prompts with images in passes of several sequences on GPUs: every row is what it is alone."""

from __future__ import annotations

import dataclasses

import cuda_on_cpu
import numpy as np
import onnxruntime as ort
import pytest
from fake_gpu import FakeDevice, FakeEngine
from lowered_engines import lower_for_gpu
from scripted_sequences import VOCABULARY, Scripted, random_images, run_together
from vlm_engines import make_vlm

from edgellm.build.onnxruntime_cuda.options import CudaOptions
from edgellm.build.plan import Plan
from edgellm.build.tensorrt.kernel_attention import Kernels
from edgellm.build.tensorrt.profiles import base_passes
from edgellm.device_runtime.runners.tensorrt.batch_runner import BatchRunner
from edgellm.device_runtime.runners.tensorrt.sequences import shared_rows
from edgellm.device_runtime.sessions.contexts import Context
from edgellm.device_runtime.sessions.decoder import DecoderSession, Part
from edgellm.export import visual
from edgellm.export.bundle import ExportOptions, export_llm
from edgellm.export.source import open_checkpoint
from edgellm.manifest import (
    LLM_BUNDLE,
    LLM_ENGINE,
    GraphSpec,
    load_bundle,
    load_engine,
    with_kv_dtype,
)
from edgellm.roles import DECODER

pytestmark = pytest.mark.usefixtures("one_thread")
CAPACITY, MOST = 160, 4
PLAN = Plan(128, CAPACITY, 1, max_verify_tree_size=12, max_batch_size=MOST)


def open_cuda(folder) -> DecoderSession:
    """Fused attention beside products, passes numbered for recording, on the CPU."""
    plan = dataclasses.replace(PLAN, options=CudaOptions("fused"))
    with cuda_on_cpu.fused_in_float32():
        cuda_on_cpu.build_base(folder / "fp32", folder / "engine", plan)
    with cuda_on_cpu.recording():
        return cuda_on_cpu.open_base(folder / "engine")


@pytest.fixture(scope="module", params=visual.supported())
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = open_checkpoint(str(make_vlm(folder / "checkpoint", request.param)))
    for dtype in ("fp32", "fp16"):
        export_llm(checkpoint, folder / dtype, ExportOptions(dtype, num_layers=2))
    return folder


def open_tensorrt(folder) -> DecoderSession:
    """Edgellm's kernels, on a GPU that is not there."""
    spec = with_kv_dtype(load_bundle(folder / "fp16", LLM_BUNDLE).spec, "float16")
    graph, kernels = folder / "lowered.onnx", Kernels(110, "fp16", MOST)
    lower_for_gpu(folder / "fp16" / "model.onnx", graph, kernels=kernels, capacity=CAPACITY)
    passes, device = base_passes(PLAN), FakeDevice()
    runner = BatchRunner(
        FakeEngine(graph, passes, device),
        device,
        most_rows=passes[-1].max_rows,
        tree_rows=shared_rows(PLAN.max_verify_tree_size, MOST),
        spec=spec,
        capacity=CAPACITY,
        num_sequences=MOST,
    )
    runner.prepare()
    return DecoderSession(runner, spec, CAPACITY)


OPEN = {"cuda": open_cuda, "tensorrt": open_tensorrt}


@pytest.mark.parametrize("backend", OPEN)
def test_any_schedule_gives_every_sequence_its_bits(folder, backend):
    """Pieces with image rows beside others', tokens and trees; positions of each its own."""
    session, rng = OPEN[backend](folder), np.random.default_rng(2)
    spec = load_bundle(folder / "fp16", LLM_BUNDLE).decoder
    run_together(session, lambda at: Scripted(at, CAPACITY, spec), MOST + 1, rng)
