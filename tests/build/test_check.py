"""The check of a build: lowerings that compute something else are stopped, and where is said."""

from __future__ import annotations

import cuda_on_cpu
import numpy as np
import pytest
from eagle_engines import draft_plan
from tensorrt_bundles import Bundles

from edgellm.build import check
from edgellm.build.engine import build_engine
from edgellm.build.lowering import contrib_ops
from edgellm.build.lowering.linear_weights import LinearWeight, WeightPart
from edgellm.build.lowering.weights import parameter_name
from edgellm.build.onnxruntime_cpu import compiler, grouped_attention, lower
from edgellm.build.onnxruntime_cuda import lower as cuda_lower
from edgellm.build.plan import Plan, image_plan
from edgellm.contract import BrokenArtifactError, EdgeLLMError
from edgellm.manifest import LLM_BUNDLE, load_bundle

pytestmark = pytest.mark.usefixtures("one_thread")
PLAN = Plan(48, 64, 1, "auto", max_verify_tree_size=12)
INT4 = Plan(48, 64, 1, "auto", "int4", max_verify_tree_size=12)
INT8 = Plan(48, 64, 1, "auto", "int8", max_verify_tree_size=12)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory) -> Bundles:
    return Bundles(tmp_path_factory.mktemp("check"))


# ------------------------------------------------------------------------------ sabotage
def without_mask(monkeypatch) -> None:
    """Rows of a tree see their siblings."""
    whole = lower.lower_attention
    monkeypatch.setattr(lower, "lower_attention", lambda graph, **_: whole(graph, needs_mask=False))


def with_the_rope_of_another(monkeypatch) -> None:
    """Cosine and sine of the second layer change places."""
    whole = grouped_attention._emit_gqa

    def emit(graph, attention, *rest):
        whole(graph, attention, *rest)
        if attention.name.startswith("layers.1."):
            node = graph.find("GroupQueryAttention")[-1]
            cos, sin = node.inputs[7:9]
            node.replace_input_with(7, sin)
            node.replace_input_with(8, cos)

    monkeypatch.setattr(grouped_attention, "_emit_gqa", emit)


def without_scales(monkeypatch) -> None:
    """Codes of quantized weights for their values, but for one factor."""
    whole = WeightPart.scales
    monkeypatch.setattr(
        WeightPart, "scales", lambda part: np.full_like(found := whole(part), found.max())
    )


def with_swapped_weights(monkeypatch) -> None:
    """Those of gate and up in the second layer, which have one shape."""
    whole = LinearWeight.dense

    def dense(weight):
        found, names = whole(weight), [parameter_name(part.operand) for part in weight.parts]
        if "layers.1.mlp.gate_proj" not in names[0]:
            return found
        return np.ascontiguousarray(np.roll(found, weight.widths[0], axis=1))

    monkeypatch.setattr(LinearWeight, "dense", dense)


def with_another_epsilon(monkeypatch) -> None:
    """Norms forget theirs."""
    whole = contrib_ops.lower_norms

    def forget(graph):
        for node in graph.find("RMSNormalization", "LayerNormalization"):
            node.attributes["epsilon"] = check.ir.AttrFloat32("epsilon", 0.5)
        whole(graph)

    for module in (lower, cuda_lower):
        monkeypatch.setattr(module, "lower_norms", forget)


SABOTAGES = {
    "mask": (without_mask, PLAN, "model.layers.0.post_attention"),
    "mask of int8": (without_mask, INT8, "model.layers.0.post_attention"),
    "mask of int4": (without_mask, INT4, "model.layers.0.post_attention"),
    "rope": (with_the_rope_of_another, PLAN, "model.layers.1.post_attention"),
    "rope of int8": (with_the_rope_of_another, INT8, "model.layers.1.post_attention"),
    "scales": (without_scales, INT4, "model.layers.0."),
    "weights": (with_swapped_weights, PLAN, "model.layers.2.input"),
    "weights of int8": (with_swapped_weights, INT8, "model.layers.2.input"),
    "norms": (with_another_epsilon, PLAN, "model.layers.0.post_attention"),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_faulty_lowering_stops_the_build(bundles, tmp_path, monkeypatch, name):
    sabotage, plan, where = SABOTAGES[name]
    bundle = bundles.make("eagle_base", "fp16", "fp32")
    sabotage(monkeypatch)
    with pytest.raises(EdgeLLMError, match="computes something else than the portable") as caught:
        build_engine("llm", bundle, tmp_path / "engine", plan, "onnxruntime", lambda _: None)
    assert f"it begins before {where}" in str(caught.value)
    assert not (tmp_path / "engine").exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", ["onnxruntime", "onnxruntime_cuda"])
def test_drafts_and_half_precision(bundles, tmp_path, monkeypatch, backend):
    with_another_epsilon(monkeypatch)
    with cuda_on_cpu.cuda_is_the_cpu(), pytest.raises(EdgeLLMError, match="lowered draft graph"):
        build_engine(
            "draft", bundles.make("draft", "fp16"), tmp_path / "e", draft_plan(), backend,
            lambda _: None,
        )  # fmt: skip


def test_encoders(bundles, tmp_path, monkeypatch):
    with_another_epsilon(monkeypatch)
    with pytest.raises(EdgeLLMError, match="lowered encoder graph"):
        build_engine(
            "visual", bundles.make("qwen2_5_vl", "fp16", "fp32"), tmp_path / "e",
            image_plan(4, 64, 64, 1), "onnxruntime", lambda _: None,
        )  # fmt: skip


# --------------------------------------------------------------------------- honest builds
@pytest.mark.parametrize("precision", ["fp16", "fp8", "int4_awq", "int8_sq"])
@pytest.mark.parametrize("backend", ["onnxruntime", "onnxruntime_cuda"])
def test_honest_lowerings_stay_far_below_the_bound(bundles, tmp_path, precision, backend):
    bundle = bundles.make("eagle_base", precision)
    with cuda_on_cpu.cuda_is_the_cpu():
        built = build_engine("llm", bundle, tmp_path / "e", PLAN, backend, lambda _: None)
    (said,) = built.options["checks"]
    error, bound = (float(said.split(before)[1].split()[0].strip("();")) for before in
                    ("differ by ", "(rounding: "))  # fmt: skip
    assert "12 rows" in said
    assert error <= bound / 2
    left = {path.name for path in (tmp_path / "e").iterdir()}
    assert not left & {"reference.onnx", "model.weights", "rounded.data"}


def test_where_the_portable_graph_does_not_run(bundles, tmp_path, monkeypatch):
    """An older ONNX Runtime; what it saved is then compared with what it was made from."""
    bundle = bundles.make("base", "fp16", "fp32")

    def refuse(*_: object, **__: object):
        raise BrokenArtifactError("ONNX Runtime 1.22 cannot load it")

    monkeypatch.setattr(check, "load_graph", refuse)
    built = build_engine("llm", bundle, tmp_path / "e", PLAN, "onnxruntime", lambda _: None)
    assert built.options["checks"] == [
        "decoder: not compared with the portable graph: ONNX Runtime 1.22 cannot load it"
    ]
    found = iter(([{"logits": np.array([[1.0, 2]], np.float32)}],
                  [{"logits": np.array([[2.0, 1]], np.float32)}]))  # fmt: skip
    monkeypatch.setattr(compiler, "run_passes", lambda *_: next(found))
    with pytest.raises(EdgeLLMError, match="saved a decode graph that computes something else"):
        build_engine("llm", bundle, tmp_path / "other", PLAN, "onnxruntime", lambda _: None)


def test_weights_on_another_disk_cannot_be_linked(bundles, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(check.os, "link", fail)
    built = build_engine(
        "llm", bundles.make("base", "fp16", "fp32"), tmp_path / "e", PLAN, "onnxruntime",
        lambda _: None,
    )  # fmt: skip
    assert "cross-device link" in built.options["checks"][0]


def test_the_samples_have_a_prompt_a_row_and_a_tree(bundles):
    bundle = load_bundle(bundles.make("base", "fp16", "fp32"), LLM_BUNDLE)
    passes = check.sample_passes("decoder", bundle, 64, 64)
    assert [each["input_ids"].shape[1] for each in passes] == [6, 1, 5]
    assert ["tree_mask" in each for each in passes] == [False, False, True]
    assert passes[2]["position_ids"].tolist() == [[7, 8, 8, 9, 9]]
    assert passes[2]["tree_mask"].sum(axis=1).tolist() == [1, 2, 2, 3, 3]
