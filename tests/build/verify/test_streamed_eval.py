"""The reference of a check reads weights in pieces, once for both of its versions."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
from mixed_gguf import write_mixed
from tensorrt_bundles import Bundles

from edgellm.build.engine import build_engine
from edgellm.build.lowering.linears.round_int4 import nearest_int4, round_stored, rounded_weights
from edgellm.build.onnxruntime_cpu.graph_variants import variants_of
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.build.verify import reference, streamed_eval
from edgellm.build.verify.check import row_errors
from edgellm.build.verify.rounding_simulation import Rounds
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.device_runtime.kernels import packed_layout
from edgellm.device_runtime.networks.decoder import open_decoder
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")
PLAN = Plan(
    max_input_len=48, kv_capacity=64, threads=1, prefill="auto", options=CpuOptions("edgellm")
)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory) -> Bundles:
    return Bundles(tmp_path_factory.mktemp("pieces"))


def _reference(folder, tmp_path, quantize):
    bundle = load_bundle(folder, LLM_BUNDLE)
    path = folder / bundle.graphs["decoder"].path
    variants = variants_of(
        "decoder", ir.load(path), bundle, dataclasses.replace(PLAN, quantize=quantize)
    )
    with rounded_weights(tmp_path, quantize) as rounded:
        source = reference.Source(
            role="decoder",
            bundle=bundle,
            path=path,
            rounded=rounded,
            cache=bundle.cache,
            capacity=PLAN.kv_capacity,
        )
        return reference.make_reference(source, 64, Rounds(tuple(each.kernel for each in variants)))


@pytest.mark.each_change("fp32-int4", "fp16-int8", "fp32-none")
@pytest.mark.parametrize("quantize", ["int4", "int8", "none"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_pieces_and_slices_change_no_number(bundles, tmp_path, monkeypatch, quantize, precision):
    folder = bundles.make("eagle_base", "fp16", precision)
    whole = _reference(folder, tmp_path, quantize)
    sessions, load = [], streamed_eval.load_in_memory

    def counted(*arguments):
        sessions.append(1)
        return load(*arguments)

    monkeypatch.setattr(streamed_eval, "load_in_memory", counted)
    monkeypatch.setattr(streamed_eval, "PIECE", 1 << 12)
    monkeypatch.setattr(streamed_eval, "SLICE", 1 << 11)
    found = _reference(folder, tmp_path, quantize)
    assert len(sessions) > 8
    monkeypatch.setattr(streamed_eval, "together", lambda *_: None)
    apart = _reference(folder, tmp_path, quantize)
    assert whole.exact.keys() == found.exact.keys()
    assert whole.rounded.keys() == found.rounded.keys()
    assert bool(whole.rounded) is ((quantize, precision) != ("none", "fp32"))
    for name, expected in whole.exact.items():  # sums in another order
        assert row_errors(found.exact[name], expected) < 1e-4
        assert row_errors(apart.exact[name], expected) < 1e-4
    for name, expected in apart.rounded.items():  # whose slices have errors of their own
        assert row_errors(found.rounded[name], expected) < 1e-3


def test_weights_of_a_gguf_file_are_decoded_once(tmp_path, monkeypatch):
    """All formats, in several pieces; merged versions equal separate ones."""
    checkpoint = open_checkpoint(str(write_mixed(tmp_path)))
    export_llm(checkpoint, tmp_path / "bundle", ExportOptions(dtype="fp16"))  # fp32 makes floats
    graphs, together = [], streamed_eval.together
    monkeypatch.setattr(
        streamed_eval, "together", lambda *both: graphs.append(together(*both)) or graphs[-1]
    )
    found = _reference(tmp_path / "bundle", tmp_path, "auto")
    (graph,) = (each.graph for each in graphs)
    products = [node for node in graph.node if node.op_type == "Split"]
    assert len(products) == 2 * 7 + 1  # of two layers, and the head
    stored = {each.name for each in graph.initializer if each.external_data}
    read = Counter(
        node.input[0]
        for node in graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in stored
    )
    assert read
    assert set(read.values()) == {1}
    monkeypatch.setattr(streamed_eval, "together", lambda *_: None)
    apart = _reference(tmp_path / "bundle", tmp_path, "auto")
    assert found.exact.keys() == apart.exact.keys() == found.rounded.keys()
    for name, expected in apart.exact.items():
        assert row_errors(found.exact[name], expected) < 1e-4
        assert row_errors(found.rounded[name], apart.rounded[name]) < 1e-3


def test_both_versions_share_their_products(bundles, tmp_path, monkeypatch):
    graphs, together = [], streamed_eval.together
    monkeypatch.setattr(
        streamed_eval, "together", lambda *both: graphs.append(together(*both)) or graphs[-1]
    )
    for quantize in ("int4", "int8"):
        _reference(bundles.make("eagle_base", "fp16", "fp32"), tmp_path, quantize)
        nodes = [node for node in graphs[-1].graph.node if node.op_type == "Split"]
        assert len(nodes) == 4 * 7 + 1  # of four layers, and the head


@pytest.mark.parametrize("shape", [(64, 96), (513, 32), (1100, 64)])
def test_rounding_by_slices_is_rounding_whole(shape):
    rows = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    whole = nearest_int4(np.ascontiguousarray(rows.T), 32)
    for found, expected in zip(round_stored(ir.tensor(rows), 32), whole, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_the_check_does_not_change_the_engine(bundles, tmp_path, monkeypatch):
    """Weights rounded by the check are packed to the same bits as without the check."""
    monkeypatch.setattr(packed_layout, "_WEIGHTS_AT_ONCE", 1 << 11)
    folder = bundles.make("eagle_base", "fp16", "fp32")
    logits = []
    for checks in (True, False):
        plan = dataclasses.replace(PLAN, quantize="int4", checks=checks)
        engine = tmp_path / str(checks)
        built = build_engine("llm", folder, engine, plan, "onnxruntime", lambda _: None)
        rows = np.arange(20, 40)
        logits.append(open_decoder(engine, built).run(rows, 0, np.arange(20)).logits.copy())
    np.testing.assert_array_equal(*logits)
