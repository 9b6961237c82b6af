"""Real engines, compiled ahead of time by TensorRT-RTX on a machine without a GPU, and their gates.

The kernels are those of the compiler's own list (`kernel_log.py`). What runs on a GPU, and what
full TensorRT makes of the same graphs, is seen elsewhere (`benchmarks/gpu`).
"""

from __future__ import annotations

import onnx_ir as ir
import pytest
from conftest import make_checkpoint
from tensorrt_bundles import (
    CAPACITY,
    HEADS,
    LAYERS,
    PRECISIONS,
    TREE,
    Bundles,
    Engine,
    compile_bundle,
)
from vlm_engines import FAMILIES, SHARED_ENCODERS

from edgellm.build.lowering.linears.weights import linear_layers
from edgellm.build.tensorrt import compiler
from edgellm.build.tensorrt.kernel_log import Kernel, copied_caches
from edgellm.build.tensorrt.lowering.int4_blocks import layout_of
from edgellm.build.tensorrt.lowering.op_support import check_graph
from edgellm.build.tensorrt.lowering.op_table import lacking
from edgellm.core.errors import EdgeLLMError
from edgellm.core.graph_io import (
    CANDIDATE_IDS,
    CANDIDATE_LOG_PROBS,
    PRESENT,
)
from edgellm.core.manifest import DRAFT_ENGINE, DRAFT_FOLDER, load_engine
from edgellm.device_runtime.runners.tensorrt.library import trt_import
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

pytest.importorskip(
    "tensorrt_rtx", reason="engines are compiled with tensorrt_rtx: pip install '.[tensorrt-rtx]'"
)
pytestmark = pytest.mark.usefixtures("one_thread")

# Launches for each layer at most, for one row and for many. int8_sq: the smoothing factor is a
# kernel. nvfp4: so is the rounding of each input, in blocks.
KERNELS = {"fp16": (7, 11), "fp8": (9, 11), "int4_awq": (8, 14), "int8_sq": (12, 14),
           "nvfp4": (16, 19)}  # fmt: skip
MORE_FOR_SMALL_BLOCKS = 5  # of INT4, whose inputs stand twice; widths of 96 have blocks of 32
DRAFT_KERNELS = {"fp16": 20, "fp8": 21, "int4_awq": 27, "int8_sq": 24, "nvfp4": 29}
STORED = {"fp8": "FP8", "int4_awq": "Int4", "int8_sq": "Int8", "nvfp4": "FP4E2M1"}
PRODUCTS = {
    "fp8": "FP8 x FP8",
    "int4_awq": "Int4",
    "int8_sq": "Int8 x Int8",
    "nvfp4": "FP4E2M1 x FP4E2M1",
    "fp16": "Half",
}
OUTSIDE_LAYERS = 12  # mask, positions, embedding, head
KINDS = ("base", "eagle_base", "draft")
GPUS = (89, 120)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory) -> Bundles:
    return Bundles(tmp_path_factory.mktemp("bundles"))


# Of what there is; the older GPU refuses NVFP4, see the end. Bases with trees have the passes of
# those without, too. Drafts have the same layers, so each precision is on both GPUs: of a base on
# one, of a draft on the other.
CASES = [
    (kind, precision, GPUS[(at + first) % 2] if precision != "nvfp4" else 120)
    for kind, first in (("eagle_base", 1), ("draft", 0))
    for at, precision in enumerate(PRECISIONS)
]
CASES.append(("wide", "int4_awq", 120))


@pytest.mark.each_change(
    "draft-fp16-89",
    "draft-int4_awq-89",
    "draft-int8_sq-89",
    "draft-fp8-120",
    "eagle_base-nvfp4-120",
)
@pytest.mark.parametrize(("kind", "precision", "sm"), CASES)
def test_decoders_compile_to_few_kernels(bundles, tmp_path, kind, precision, sm):
    bundle = bundles.make(kind, precision)
    engine = compile_bundle(bundle, kind, tmp_path / "engine", sm)
    passes = {
        "wide": ("decode", "prefill"),
        "eagle_base": ("decode", "verify", "prefill"),
        "draft": ("step", "prefill"),
    }
    assert engine.passes == passes[kind]
    is_small = precision == "int4_awq" and kind != "wide"
    assert ["take 8 bits a weight" in note for note in engine.notes] == [True] * is_small
    layers = 1 if kind == "draft" else LAYERS
    stored = _stored_values(bundle)
    assert bool(stored) == (precision != "fp16")
    for index, name in enumerate(engine.passes):
        kernels = engine.of(name)
        assert sum(kernel.is_fused_attention for kernel in kernels) == layers
        assert not any(kernel.decodes_weight for kernel in kernels)
        assert copied_caches(kernels, index, CAPACITY, HEADS) == 0
        products = {product for kernel in kernels for product in kernel.products}
        assert products == {PRODUCTS[precision], "Half"}  # the head
        if precision != "fp16":
            assert _read_as_stored(kernels, STORED[precision]) == stored
        few, many = KERNELS[precision]
        each = (few if name == "decode" else many) + MORE_FOR_SMALL_BLOCKS * is_small
        allowed = OUTSIDE_LAYERS + layers * each
        assert len(kernels) <= (DRAFT_KERNELS[precision] if kind == "draft" else allowed)


def test_products_of_adapters_are_fused(bundles, tmp_path):
    """Decoding needs one more kernel for each product, with adapters and without."""
    bundle, precision = bundles.make("wide", "int4_awq"), "int4_awq"
    engine = compile_bundle(bundle, "wide", tmp_path / "engine", 120, lora_rank=16)
    assert engine.passes == ("decode", "decode_adapted", "prefill", "prefill_adapted")
    for index, name in enumerate(engine.passes):
        kernels = engine.of(name)
        assert sum(kernel.is_fused_attention for kernel in kernels) == LAYERS
        assert not any(kernel.decodes_weight for kernel in kernels)
        assert copied_caches(kernels, index, CAPACITY, HEADS) == 0
        assert _read_as_stored(kernels, STORED[precision]) == _stored_values(bundle)
        if name.startswith("decode"):
            assert len(kernels) <= OUTSIDE_LAYERS + LAYERS * (KERNELS[precision][0] + 7)


@pytest.mark.each_change("gemma2")
@pytest.mark.parametrize("model_type", ["gemma2", "glm4", "hunyuan_v1_dense", "cohere2"])
def test_features_of_other_architectures_compile(tmp_path, model_type):
    """Soft caps, partial and interleaved RoPE, norms after RoPE, layers without RoPE."""
    config = {**models.find(model_type).TINY, "hidden_size": 128, "num_attention_heads": 8}
    make_checkpoint(tmp_path / "checkpoint", **config)
    source = open_checkpoint(str(tmp_path / "checkpoint"))
    export_llm(source, tmp_path / "bundle", ExportOptions(dtype="fp16", num_layers=2))
    engine = compile_bundle(tmp_path / "bundle", "base", tmp_path / "engine", 120)
    assert engine.passes == ("decode", "prefill")
    for index, name in enumerate(engine.passes):
        assert copied_caches(engine.of(name), index, CAPACITY, HEADS) == 0


@pytest.mark.parametrize("sm", [120, 89])
def test_medusa_heads_compile_to_one_pass(bundles, tmp_path, sm):
    """One pass of fixed sizes; the heads' first layers, with the same input, are merged."""
    engine = compile_bundle(bundles.make("heads", "fp16"), "heads", tmp_path / "engine", sm)
    assert (engine.passes, engine.notes) == (("heads",), ())
    assert {kernel.pass_index for kernel in engine.kernels} == {0}
    assert len(engine.kernels) <= 6
    manifest = load_engine(tmp_path / "engine" / DRAFT_FOLDER, DRAFT_ENGINE)
    assert [(graph.path, graph.max_rows) for graph in manifest.main_graphs] == [("heads.engine", 1)]
    assert (manifest.machine, manifest.cost_ms) == (f"sm{sm}", {})
    outputs = {each.name: each.dims for kernel in engine.kernels for each in kernel.outputs}
    assert outputs[CANDIDATE_IDS] == outputs[CANDIDATE_LOG_PROBS] == (1, 3, TREE)


def _stored_values(bundle) -> int:
    """Codes of the bundle's linear layers in the engine's layout."""
    layers = [weight for _, weight in linear_layers(ir.load(bundle / "model.onnx").graph)]
    layouts = (layout_of(weight) for weight in layers)
    return sum(
        weight.count * (layout.codes_each if layout else 1)
        for weight, layout in zip(layers, layouts, strict=True)
        if weight.kind != "dense"
    )


def _read_as_stored(kernels: list[Kernel], dtype: str) -> int:
    """Number of constants of a type in a pass."""
    constants = [each for kernel in kernels for each in kernel.constants]
    return sum(each.count for each in constants if each.dtype == dtype)


@pytest.mark.each_change("qwen2_5_vl-int8", "idefics3-fp8")
@pytest.mark.parametrize(
    ("family", "precision"),
    [
        (family, precision)
        for family in FAMILIES
        for precision in ("fp16", "int8", "fp8")
        if family not in SHARED_ENCODERS or precision == "fp16"
    ],
)
def test_encoders_compile_to_few_kernels(bundles, tmp_path, family, precision):
    """Each on one of the GPUs; each family and each precision runs on both."""
    bundle = bundles.make(family, precision)
    sm = GPUS[(FAMILIES.index(family) + (precision == "int8")) % 2]
    _check_encoder(compile_bundle(bundle, family, tmp_path / "engine", sm), bundle)


def _check_encoder(engine: Engine, bundle) -> None:
    assert engine.passes == ("image",)
    nodes = list(ir.load(bundle / "model.onnx").graph)
    attentions = sum(node.op_type == "Attention" for node in nodes)
    assert sum(kernel.is_fused_attention for kernel in engine.kernels) == attentions > 0
    # The patch embedding of tiles may be a convolution, whose weight is decoded once an image.
    assert sum(kernel.decodes_weight for kernel in engine.kernels) <= 1
    # Clipped layers come with norms of heads, and after each branch
    of_layer = 20 if any(node.op_type == "Clip" for node in nodes) else 16
    assert len(engine.kernels) <= OUTSIDE_LAYERS + of_layer * attentions


# ------------------------------------------------------------------------- older TensorRTs
OLDER = [
    ((10, 3), "base", "int4_awq", 89),
    ((10, 3), "draft", "fp16", 89),
    ((10, 3), "smolvlm", "fp16", 89),
    ((10, 13), "base", "nvfp4", 120),
    ((10, 16), "draft", "fp8", 89),
]


@pytest.mark.each_change("version1-*", "version4-*")
@pytest.mark.parametrize(("version", "kind", "precision", "sm"), OLDER)
def test_graphs_of_older_versions_compile(
    bundles, tmp_path, monkeypatch, version, kind, precision, sm
):
    """TensorRT-RTX compiles the graphs for older TensorRT versions."""
    monkeypatch.setattr(trt_import, "RTX_TAKES", version)
    caches, build = [], compiler.build

    def checked(path, *arguments, **options):
        model = ir.load(path)
        assert check_graph(model, version) == []
        assert {"Swish", *lacking(version)}.isdisjoint(node.op_type for node in model.graph)
        outputs = {str(each.name): each for each in model.graph.outputs}
        caches.extend(str(each.shape[2]) for name, each in outputs.items() if PRESENT in name)
        return build(path, *arguments, **options)

    monkeypatch.setattr(compiler, "build", checked)
    assert compile_bundle(bundles.make(kind, precision), kind, tmp_path / "engine", sm).kernels
    assert set(caches) <= {"rows" if version < (10, 15) else str(CAPACITY)}
    assert bool(caches) == (kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_precisions_missing_in_an_older_version_are_rejected(bundles, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(trt_import, "RTX_TAKES", (10, 3))
    monkeypatch.setattr(compiler, "lower", lambda *_: pytest.fail("worked before it was asked"))
    with pytest.raises(EdgeLLMError, match=r"NVFP4 needs TensorRT 10\.8 or newer, not") as caught:
        compile_bundle(bundles.make(kind, "nvfp4"), kind, tmp_path / "engine", 120)
    assert "JetPack 7.2" in caught.value.hint
    assert not (tmp_path / "engine" / "manifest.json").exists()


# ------------------------------------------------------------------------ the gates can fail
def test_attention_in_float32_is_not_fused(bundles, tmp_path):
    engine = compile_bundle(bundles.make("base", "fp16", "fp32"), "base", tmp_path / "engine", 120)
    assert sum(kernel.is_fused_attention for kernel in engine.of("prefill")) == 0
    assert f"prefill: 0 of {LAYERS} attentions are one kernel" in engine.notes


def test_weights_in_blocks_of_8_bits_are_decoded_for_prompts(bundles, tmp_path):
    engine = compile_bundle(bundles.make("base", "fp8-blocks"), "base", tmp_path / "engine", 120)
    assert any(kernel.decodes_weight for kernel in engine.of("prefill"))


@pytest.mark.parametrize(("sm", "first", "precision"), [(89, "10.0", "nvfp4"), (86, "8.9", "fp8")])
@pytest.mark.parametrize("kind", KINDS)
def test_precisions_missing_on_a_gpu_are_rejected(bundles, tmp_path, kind, sm, first, precision):
    name = {"nvfp4": "NVFP4", "fp8": "FP8"}[precision]
    said = f"{name} needs a GPU of compute capability {first} or newer, not {sm / 10}"
    with pytest.raises(EdgeLLMError, match=said) as caught:
        compile_bundle(bundles.make(kind, precision), kind, tmp_path / "engine", sm)
    assert "int8_sq" in caught.value.hint
    assert not (tmp_path / "engine" / "manifest.json").exists()
