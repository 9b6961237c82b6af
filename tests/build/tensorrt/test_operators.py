"""All graphs in all precisions, for all TensorRT versions: each node against the table."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from block_reference import LAYOUTS, make_blocks
from conftest import make_checkpoint
from model_configs import attending
from tensorrt_bundles import CAPACITY, PRECISIONS, TOWER, TREE, Bundles
from vlm_engines import FAMILIES, GPU_FAMILIES, SHARED_ENCODERS

from edgellm.build.lowering.function_calls import inline
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.plan import Plan
from edgellm.build.resource_estimate import predict
from edgellm.build.tensorrt.lowering import op_table
from edgellm.build.tensorrt.lowering.downgrade_ops import adapt, rewrite
from edgellm.build.tensorrt.lowering.kernel_attention import Kernels
from edgellm.build.tensorrt.lowering.lower import lower
from edgellm.build.tensorrt.lowering.op_support import check_graph
from edgellm.build.tensorrt.lowering.op_table import CHECKED
from edgellm.core import graph_io
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import DRAFT_BUNDLE, VISUAL_BUNDLE, load_bundle
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft
from edgellm.multimodal.patch_grid import grid_inputs

ENCODERS = [
    (family, precision)
    for family in FAMILIES
    for precision in ("fp16", "int8", "fp8")
    if family not in SHARED_ENCODERS or precision == "fp16"
]
TEXTS = [
    (family, precision)
    for family in GPU_FAMILIES
    for precision in PRECISIONS
    if family not in SHARED_ENCODERS or precision == "fp16"
]
CASES = [
    *((kind, precision) for kind in ("eagle_base", "draft") for precision in PRECISIONS),
    ("base", "fp16"),
    ("heads", "fp16"),
    *ENCODERS,
]
LACKING = {  # what the graphs of a base have that a version does not take, as they are lowered
    (10, 3): {"Attention", "Clip", "RMSNormalization", "RotaryEmbedding", "Swish",
              "TensorScatter", "opset"},
    (10, 16): {"Attention", "Clip", "Swish"},
    (11, 4): set(),
}  # fmt: skip
LACKING[10, 13] = LACKING[10, 3]
ROWS, WRITTEN = 5, 3


@pytest.fixture(scope="module")
def bundles(tmp_path_factory) -> Bundles:
    return Bundles(tmp_path_factory.mktemp("bundles"))


def lowered(
    bundle,
    name: str,
    folder,
    *,
    is_draft: bool,
    dtype: ir.DataType = ir.DataType.FLOAT16,
    kernels: Kernels | None = None,
) -> ir.Model:
    """The graph that `llm_build` and `visual_build` pass to the parser."""
    model, weights = ir.load(bundle / f"{name}.onnx"), WeightFile(folder / f"{name}.data")
    if any(value.name == graph_io.LOGITS_INDEX for value in model.graph.inputs) or is_draft:
        candidates = TREE if is_draft and name == "model" else 0
        lower(model, weights, dtype, CAPACITY, candidates, kernels)
    else:
        lower(model, weights, dtype)
    weights.close()
    return model


@pytest.mark.each_change(
    "eagle_base-fp16",
    "eagle_base-nvfp4",
    "eagle_base-int8_sq",
    "draft-int4_awq",
    "draft-fp8",
    "heads-fp16",
    "gemma3-int8",
    "qwen2_5_vl-fp8",
    "qwen3_5-fp16",
)
@pytest.mark.parametrize(("kind", "precision"), CASES)
def test_every_version_supports_the_adapted_graph(bundles, tmp_path, kind, precision):
    bundle = bundles.make(kind, precision)
    is_draft = kind in ("draft", "heads")
    for path in bundle.glob("*.onnx"):
        model = lowered(bundle, path.stem, tmp_path, is_draft=is_draft and path.stem != "fuse")
        for version in CHECKED:
            if "base" in kind and precision != "nvfp4":
                faults = check_graph(model, version)
                assert {fault.split()[0] for fault in faults} == LACKING[version]
            adapted = model.clone()
            if precision == "nvfp4" and version == (10, 3) and path.stem != "fuse":
                with pytest.raises(EdgeLLMError, match=r"10\.3 does not take .*(FLOAT4|FP4)"):
                    adapt(adapted, version)
                continue
            adapt(adapted, version)  # which holds it against the table
            assert adapted.opset_imports[""] <= op_table.highest_opset(version)
            if version >= (11, 0):
                assert [n.op_type for n in adapted.graph] == [n.op_type for n in model.graph]


@pytest.mark.each_change("gemma3-fp16", "qwen2_5_vl-nvfp4", "gemma3-int8_sq")
@pytest.mark.parametrize(("family", "precision"), TEXTS)
def test_every_version_supports_decoders_with_images(bundles, tmp_path, family, precision):
    """Image rows, M-RoPE, DeepStack; in float16 also with edgellm's kernels."""
    bundle = bundles.make(f"{family}{TOWER}", precision)
    for kernels in (None, Kernels(sm=110, codes="fp8"))[: 1 + (precision == "fp16")]:
        model = lowered(bundle, "model", tmp_path, is_draft=False, kernels=kernels)
        assert graph_io.IMAGE_EMBEDS in {value.name for value in model.graph.inputs}
        for version in CHECKED[precision == "nvfp4" :]:  # of which 10.3 knows nothing
            adapt(model.clone(), version)


@pytest.mark.each_change("eagle_base-fp16", "eagle_base-fp8", "draft-int4_awq", "draft-int8_sq")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["eagle_base", "draft"])
def test_every_version_supports_edgellms_attention(bundles, tmp_path, kind, precision):
    bundle, kernels = bundles.make(kind, precision), Kernels(sm=110, codes="fp8")
    model = lowered(bundle, "model", tmp_path, is_draft=kind == "draft", kernels=kernels)
    for version in CHECKED[precision == "nvfp4" :]:  # of which 10.3 knows nothing
        adapt(model.clone(), version)


@pytest.mark.parametrize("name", ["eagle1", "peagle", "mtp", "low_rank"])
def test_every_version_supports_other_drafts(eagle_pairs, tmp_path, name):
    bundle = eagle_pairs(name).draft_bundle
    model = lowered(bundle, "model", tmp_path, is_draft=True, dtype=ir.DataType.FLOAT)
    for version in CHECKED:
        adapt(model.clone(), version)


def test_block_drafters_are_rejected(eagle_pairs, tmp_path):
    """Hybrids are in `test_recurrent.py`, experts in `test_experts.py`."""
    base = open_checkpoint(str(eagle_pairs("peagle").base_checkpoint))
    draft = open_draft(str(make_blocks(tmp_path / "draft", LAYOUTS["dflash"])))
    export_draft(draft, base, tmp_path / "bundle", DraftOptions("fp16"))
    plan, bundle = (
        Plan(max_input_len=ROWS, kv_capacity=CAPACITY, max_draft_tree_size=4),
        tmp_path / "bundle",
    )
    with pytest.raises(EdgeLLMError, match="dflash draft: only edgellm's kernels let tokens of a"):
        predict(bundle, load_bundle(bundle, DRAFT_BUNDLE), plan, "tensorrt", tmp_path)


@pytest.mark.each_change("gptq-order", "fp8-blocks")
@pytest.mark.parametrize("form", ["gptq-order", "ct-w8a8", "ct-int8", "fp8-blocks"])
def test_every_version_supports_its_weight_formats(bundles, tmp_path, form):
    """Zero points and permuted columns, scales of columns; FP8 in blocks from 10.13 on."""
    model = lowered(bundles.make("base", form), "model", tmp_path, is_draft=False)
    for version in CHECKED:
        if form == "fp8-blocks" and version < (10, 13):
            with pytest.raises(EdgeLLMError, match="FLOAT8E4M3FN has scales of blocks") as caught:
                adapt(model.clone(), version)
            assert "fp8 in blocks 10.13" in caught.value.hint
        else:
            adapt(model.clone(), version)


FAULTS = {
    "Sin(i)": "Sin n: input 0 is INT64",
    "Attention(x, x, x)": "Attention n: input 0 has 2 dimensions",
    "TopK(x, k)": "TopK n: input 1 is computed",
    'ScatterND<reduction = "add">(x, i, x)': "ScatterND n: reduction is add",
    "NonZero(x)": "NonZero n: is not known",
    "DequantizeLinear<axis = 1>(c, x)": "DequantizeLinear n: INT4 has no scales of blocks",
    "DequantizeLinear<block_size = 32>(c, x)": "DequantizeLinear n: INT4 has blocks of 32",
    "DequantizeLinear<block_size = 64>(b, x)": "DequantizeLinear n: INT8 has scales of blocks",
    "com.microsoft.MatMulNBits(x)": "com.microsoft::MatMulNBits n: is not known",
}


def small(node: str, opset: int = 24) -> ir.Model:
    """A graph of one node."""
    model = ir.from_onnx_text(
        f'<ir_version: 11, opset_import: ["" : {opset}, "com.microsoft" : 1]> g'
        f"(float16[2, 5] x, int64[1] k, int64[2, 1] i, int4[2, 5] c, int8[2, 5] b) => (y) "
        f"{{ y = {node} }}"
    )
    next(iter(model.graph)).name = "n"
    return model


@pytest.mark.parametrize("node", FAULTS)
def test_the_check_finds_unsupported_operators(node):
    assert check_graph(small(node), (10, 16)) == [FAULTS[node]]


def test_the_check_finds_the_opset():
    assert check_graph(small("Sin(x)", 25), (10, 16)) == ["opset 25, 24 is the highest"]
    assert check_graph(small("Sin(x)"), (10, 16)) == []


def test_the_table_begins_with_10_3():
    with pytest.raises(ValueError, match="no table"):
        op_table.rules((10, 2))


# ------------------------------------------------------------------- they compute what they did
def run(model: ir.Model, folder, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    path = folder / "graph.onnx"
    ir.save(model, path)
    onnx.checker.check_model(path, full_check=True)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    wanted = {each.name for each in session.get_inputs()}
    given = {name: array for name, array in feeds.items() if name in wanted}
    return dict(zip(names, session.run(None, given), strict=True))


def decoder_feeds(model: ir.Model) -> dict[str, np.ndarray]:
    """Rows of a tree after `WRITTEN` random ones."""
    random = np.random.default_rng(0)
    tree = np.tril(np.ones((ROWS, ROWS), np.bool_))
    tree[3, 2] = False
    feeds = {
        graph_io.INPUT_IDS: random.integers(9, 96, (1, ROWS)),
        graph_io.POSITION_IDS: np.array([[3, 4, 5, 5, 6]]),
        graph_io.WRITE_INDEX: np.array([WRITTEN]),
        graph_io.TREE_MASK: tree,
        graph_io.LOGITS_INDEX: np.arange(ROWS),
    }
    for each in model.graph.inputs:
        if each.name not in feeds:
            shape = [dim if isinstance(dim, int) else 16 for dim in each.shape]
            feeds[each.name] = random.normal(size=shape).astype(each.dtype.numpy())
    return feeds


def expanded(path) -> ir.Model:
    """A portable graph without functions."""
    model = ir.load(path)
    inline(model)
    return model


def check_numbers(path, feeds, tolerance: float) -> None:
    expected = run(expanded(path), path.parent, feeds)
    for version in ((10, 3), (10, 16)):  # 10.13's graphs are those of 10.3
        adapted = expanded(path)
        rewrite(adapted, version)
        kinds = {node.op_type for node in adapted.graph}
        assert "Swish" not in kinds
        is_capped = any("softcap" in node.attributes for node in expanded(path).graph)
        assert (version == (10, 16) and not is_capped) == ("Attention" in kinds)
        found = run(adapted, path.parent, feeds)
        assert list(found) == list(expected)
        for name, array in expected.items():
            if version == (10, 3) and name.startswith(graph_io.PRESENT):
                array = array[:, :, WRITTEN : WRITTEN + ROWS]
            np.testing.assert_allclose(found[name], array, atol=tolerance, err_msg=name)


def _has_experts(model_type: str) -> bool:
    tiny = models.find(model_type).TINY
    return any(tiny[key] for key in tiny if "expert" in key)


@pytest.mark.parametrize("model_type", [each for each in attending() if not _has_experts(each)])
def test_adapted_decoders_equal_the_portable_graph(tmp_path, model_type):
    """All versions support the lowered graphs."""
    make_checkpoint(tmp_path / "checkpoint", **models.find(model_type).TINY)
    source = open_checkpoint(str(tmp_path / "checkpoint"))
    export_llm(source, tmp_path / "bundle", ExportOptions(dtype="fp32", num_layers=2))
    path = tmp_path / "bundle" / "model.onnx"
    check_numbers(path, decoder_feeds(ir.load(path)), 2e-5)
    bundle, dtype = tmp_path / "bundle", ir.DataType.FLOAT
    model = lowered(bundle, "model", tmp_path, is_draft=False, dtype=dtype)
    for version in CHECKED:
        adapt(model.clone(), version)


def test_adapted_float16_decoders_equal_the_portable_graph(bundles):
    path = bundles.make("base", "fp16") / "model.onnx"
    check_numbers(path, decoder_feeds(ir.load(path)), 3e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapted_encoders_equal_the_portable_graph(bundles, family):
    bundle = bundles.make(family, "fp16", "fp32")
    spec = load_bundle(bundle, VISUAL_BUNDLE).vision
    random, side = np.random.default_rng(0), 4
    feeds = grid_inputs(side, side, spec)
    for each in ir.load(bundle / "model.onnx").graph.inputs:
        if each.name not in feeds:
            count = 2 if spec.image_size else side * side
            shape = [dim if isinstance(dim, int) else count for dim in each.shape]
            feeds[each.name] = random.normal(size=shape).astype(np.float32)
    check_numbers(bundle / "model.onnx", feeds, 1e-4)
