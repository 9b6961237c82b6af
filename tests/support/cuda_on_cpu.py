"""Engines for ONNX Runtime's CUDA provider, whose graphs and sessions also run on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from scripted_costs import script_costs

from edgellm.build.engine import build_engine
from edgellm.build.lowering.contrib_ops import finish
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.onnxruntime_cuda import attention, kernel_table
from edgellm.build.plan import Plan
from edgellm.core import onnx_functions
from edgellm.core.manifest import (
    DRAFT_ENGINE,
    DRAFT_FOLDER,
    LLM_ENGINE,
    VISUAL_ENGINE,
    Engine,
    load_engine,
)
from edgellm.device_runtime.networks import draft, encoder
from edgellm.device_runtime.networks.decoder import DecoderNetwork, open_decoder
from edgellm.device_runtime.networks.draft import DraftNetwork
from edgellm.device_runtime.networks.encoder import EncoderNetwork
from edgellm.device_runtime.runners.onnxruntime_cuda import attention_inputs
from edgellm.device_runtime.runners.onnxruntime_cuda import provider as cuda
from edgellm.device_runtime.runners.onnxruntime_cuda.loading import Loader
from edgellm.device_runtime.runners.onnxruntime_graphs import GraphOptions, load_graph

CUDA = "onnxruntime_cuda"


@contextmanager
def cuda_is_the_cpu() -> Iterator[None]:
    """Open sessions of CUDA engines on the CPU, which only tests may do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "require_cuda", lambda: "cpu")
        script_costs(patch)
        yield


@contextmanager
def fused_in_float32() -> Iterator[None]:
    """Lower attention to GroupQueryAttention in a type that only its CPU kernel supports."""
    name = ("com.microsoft", "GroupQueryAttention")
    both = dataclasses.replace(
        kernel_table.KERNELS[name], types=frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16})
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "why_not_fused", lambda *_: "")
        patch.setattr(kernel_table, "KERNELS", {**kernel_table.KERNELS, name: both})
        yield


@contextmanager
def recording() -> Iterator[None]:
    """Passes are padded and numbered as where they are recorded; the CPU computes each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "can_capture", True)
        yield


class Runs:
    """Numbers of the recordings that runs asked for, and a device that fails to make one."""

    def __init__(self, patch: pytest.MonkeyPatch, *, fails: bool = False) -> None:
        self.ids: list[str] = []
        run = ort.InferenceSession.run_with_iobinding

        def counted(session, binding, options: Any = None):
            try:
                ids = options.get_run_config_entry("gpu_graph_id")
            except (AttributeError, RuntimeError):  # none, or none of this name
                ids = ""
            self.ids.append(ids)
            if fails and ids not in ("", "-1"):
                raise RuntimeError("operation not permitted when stream is capturing\nmore")
            return run(session, binding, options)

        patch.setattr(ort.InferenceSession, "run_with_iobinding", counted)


def attention_alone(
    form: attention.Form,
    folder: Path,
    q: np.ndarray,
    rows: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    seen: np.ndarray,
    begin: int,
) -> np.ndarray:
    """A layer in halves that turns nothing, as it is lowered: [1, S, heads * D].

    `rows` are the new keys, and the new values, [1, S, D], the first in slot `begin`; q is
    [1, S, heads * D], keys and values of the cache [1, 1, C, D], `seen` bool [S, T].
    """
    arrays = {"q": q, "k": rows, "v": rows, "past_key": keys, "past_value": values}
    graph, weights = _graph_of_one_layer(arrays), WeightFile(folder / "unused.data")
    capacity = keys.shape[2]
    attention.lower_cached_attention(
        GraphEditor(graph, weights), ir.DataType.FLOAT16, capacity, form
    )
    model = ir.Model(graph, ir_version=10)
    finish(model)
    weights.close()
    ir.save(model, folder / "one.onnx")
    session = load_graph(folder / "one.onnx", GraphOptions(optimize=False))
    arrays |= {
        attention_inputs.VISIBLE: seen[None, None],
        attention_inputs.SLOTS: attention_inputs.slot_indices(1, q.shape[1]),
        attention_inputs.LAST_ROW: np.array([begin + q.shape[1] - 1], np.int32),
        attention_inputs.LIVE_ROWS: np.array(seen.shape[1], np.int32),
    }
    arrays[attention_inputs.SLOTS][..., 2] = begin + np.arange(q.shape[1])
    taken = {value.name: arrays[value.name] for value in session.get_inputs()}
    return np.asarray(session.run(["y"], taken)[0])


def _graph_of_one_layer(arrays: Mapping[str, np.ndarray]) -> ir.Graph:
    """As it is exported, of arguments of these shapes."""
    half, size = ir.TensorType(ir.DataType.FLOAT16), arrays["k"].shape[2]
    call = [
        ir.Value(name=name, type=half, shape=ir.Shape(array.shape))
        for name, array in arrays.items()
    ]
    others = [ir.Value(name=name) for name in ("tree_mask", "positions", "write_index", "slots")]
    mask = ir.Node(onnx_functions.FUNCTIONS, onnx_functions.VISIBLE_SLOTS, others)
    heads = {"num_heads": arrays["q"].shape[2] // size, "kv_num_heads": 1}
    given = [*call, others[2], mask.outputs[0]], ir.convenience.convert_attributes(heads)
    layer = ir.Node(
        onnx_functions.FUNCTIONS, onnx_functions.UNROTATED_ATTENTION, *given, num_outputs=3
    )
    layer.name = "layer"
    for name, value in zip(("y", "present_key", "present_value"), layer.outputs, strict=True):
        value.name, value.type = name, half
    return ir.Graph(
        [*call, *others], layer.outputs, nodes=[mask, layer], opset_imports={"": 24}, name="one"
    )


def build_base(bundle: Path, engine: Path, plan: Plan) -> Engine:
    return build_engine("llm", bundle, engine, plan, CUDA, lambda _: None)


def build_its_draft(bundle: Path, engine: Path, plan: Plan) -> Engine:
    return build_engine("draft", bundle, engine, plan, CUDA, lambda _: None)


def build_encoder(bundle: Path, engine: Path, plan: Plan, product: str = "visual") -> Engine:
    return build_engine(product, bundle, engine, plan, CUDA, lambda _: None)


def open_base(engine: Path) -> DecoderNetwork:
    with cuda_is_the_cpu():
        manifest = load_engine(engine, LLM_ENGINE)
        return open_decoder(engine, manifest)


def open_draft(engine: Path) -> DraftNetwork:
    folder = engine / DRAFT_FOLDER
    with cuda_is_the_cpu():
        manifest = load_engine(folder, DRAFT_ENGINE)
        return draft.open_draft(folder, manifest)


def open_encoder(engine: Path, kind: str = VISUAL_ENGINE) -> EncoderNetwork:
    manifest = load_engine(engine, kind)
    with cuda_is_the_cpu():
        return encoder.open_encoder(engine, manifest)
