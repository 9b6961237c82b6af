"""All public layouts of a draft: the graphs on ONNX Runtime against a reference in torch."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import cuda_on_cpu
import numpy as np
import pytest
import torch
from conftest import make_checkpoint
from draft_layouts import BASE, LAYOUTS
from draft_runs import CAPACITY, TOLERANCE, DraftRun, K, drive
from eagle_reference import (
    BASE_HIDDEN,
    BASE_LAYERS,
    VOCAB,
    Layout,
    Reference,
    make_draft,
)
from safetensors.torch import load_file, save_file

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.core.artifact import verify_files
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import DRAFT_BUNDLE, DRAFT_FOLDER, load_bundle
from edgellm.device_runtime.networks.draft import open_draft
from edgellm.export.pipeline.draft import DraftOptions, HeadOptions, export_draft
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

EXPORTERS = {
    "safeailab": "SafeAILab", "angelslim": "AngelSlim", "specforge": "SpecForge",
    "modelopt": "ModelOpt", "speculators": "speculators", "eagle1": "SafeAILab",
    "biases": "SafeAILab", "five": "SpecForge", "peagle": "ModelOpt",
    "automodel": "Automodel",
}  # fmt: skip


@pytest.fixture(scope="session")
def draft_bases(tmp_path_factory) -> dict[bool, Path]:
    """Bases of eight layers, with tied and untied heads."""
    folder = tmp_path_factory.mktemp("draft_bases")
    return {
        tied: make_checkpoint(folder / str(tied), **{**BASE, "tie_word_embeddings": tied})
        for tied in (True, False)
    }


@pytest.fixture(params=LAYOUTS, ids=str)
def layout_name(request) -> str:
    return request.param


def _export(tmp_path, bases, layout, dtype="fp32", **options) -> tuple[DraftRun, Reference]:
    draft = make_draft(tmp_path / "draft", layout)
    base = bases[layout.tied_base]
    checkpoints = (open_checkpoint(str(folder), tokenizer=False) for folder in (draft, base))
    export_draft(
        *checkpoints, tmp_path / "bundle", DraftOptions(dtype, head=HeadOptions(**options))
    )
    manifest = load_bundle(tmp_path / "bundle", DRAFT_BUNDLE)
    return DraftRun(tmp_path / "bundle", manifest), Reference(draft, base, layout)


def test_graphs_equal_the_reference(layout_name, draft_bases, tmp_path):
    layout = LAYOUTS[layout_name]
    run, reference = _export(tmp_path, draft_bases, layout)
    spec = run.manifest.draft
    method = "peagle" if layout.mask_shape else "eagle3"
    assert spec.method == ("eagle" if layout.eagle1 else method)
    assert spec.mask_token_id == (95 if layout.mask_shape else None)
    heads = {"peagle": 8, "peagle_window": 8, "speculators_peagle": 5}
    assert spec.num_heads == heads.get(layout_name, 0)
    assert spec.decoder.sliding_window == (layout.window or None)
    assert spec.fuses is not layout.eagle1
    assert spec.hidden_taps == layout.taps
    assert (spec.draft_vocab_size, spec.decoder.vocab_size) == (layout.draft_vocab, VOCAB)
    assert (spec.base_hidden_size, spec.base_num_layers) == (BASE_HIDDEN, BASE_LAYERS)
    assert (spec.decoder.hidden_size, spec.decoder.kv.num_layers) == (layout.hidden, layout.layers)
    assert run.manifest.provenance["exporter"] == EXPORTERS[layout_name.split("_")[0]]
    assert spec.num_candidates == layout.candidates
    verify_files(run.folder, run.manifest.files)
    assert ("fuse.onnx" in run.manifest.files) is spec.fuses
    drive(run, reference)


_PEAGLE = LAYOUTS["peagle"]
FAULTS = {
    "no mask token": ({"ptd_token_id": None}, {}, "which token mask_hidden belongs to: no key"),
    "two mask tokens": ({"pard_token": 7}, {}, "ptd_token_id = 95, pard_token = 7"),
    "beyond the vocabulary": ({"ptd_token_id": VOCAB}, {}, f"ptd_token_id = {VOCAB}"),
    "a feature of another width": ({}, {"mask_hidden": torch.ones(1, 9)}, "mask_hidden has shape"),
    "no feature": ({}, {"mask_hidden": None}, "draft has no tensor mask_hidden"),
    "other taps": ({"num_aux_hidden_states": 5}, {}, "num_aux_hidden_states = 5"),
    "another low-rank head": (
        {},
        {"efficient_lm_head.down_proj.weight": torch.ones(4, 96)},
        "the draft has efficient_lm_head.down_proj.weight; of a low-rank head",
    ),
    "a low-rank head without its down projection": (
        {},
        {"efficient_lm_head.weight": torch.ones(40, 4)},
        "efficient_lm_head.weight and efficient_lm_head_down_proj.weight are read",
    ),
    "a low-rank head of other sizes": (
        {},
        {
            "efficient_lm_head.weight": torch.ones(40, 5),
            "efficient_lm_head_down_proj.weight": torch.ones(4, 96),
        },
        "efficient_lm_head.weight has shape [40, 5]",
    ),
    "no candidates": (
        {"num_candidates": 0},
        {
            "efficient_lm_head.weight": torch.ones(40, 4),
            "efficient_lm_head_down_proj.weight": torch.ones(4, 96),
        },
        "num_candidates = 0 is not positive",
    ),
    "a type for one of two layers": (
        {"layer_types": ["sliding_attention"], "sliding_window": 512},
        {},
        "layer_types = ['sliding_attention'] of 2 layers",
    ),
    "an unknown type of a layer": (
        {"layer_types": ["chunked_attention"] * 2},
        {},
        "layer_types = ['chunked_attention',",
    ),
    "a window without its size": (
        {"layer_types": ["sliding_attention"] * 2},
        {},
        "sliding_window = None, but layers slide",
    ),
    "a window without layers": (
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 28},
        {},
        "use_sliding_window = True, but no layer slides",
    ),
    "no window": (
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 0},
        {},
        "sliding_window = 0",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_unsupported_features_of_newer_drafts_are_rejected(name, draft_bases, tmp_path):
    config, tensors, message = FAULTS[name]
    draft = make_draft(tmp_path / "draft", replace(_PEAGLE, config={**_PEAGLE.config, **config}))
    found = {**load_file(draft / "model.safetensors"), **tensors}
    save_file({n: t for n, t in found.items() if t is not None}, draft / "model.safetensors")
    checkpoints = (open_checkpoint(str(f), tokenizer=False) for f in (draft, draft_bases[True]))
    with pytest.raises(EdgeLLMError, match=re.escape(message)):
        export_draft(*checkpoints, tmp_path / "bundle", DraftOptions("fp32"))
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("name", ["specforge_eagle31", "eagle1", "peagle"])
@pytest.mark.parametrize("rank", [40, 10])
def test_a_low_rank_head_is_the_svd_of_the_head(name, rank, draft_bases, tmp_path):
    """With the whole rank, the candidates are those of the head itself."""
    options = {"rank": rank, "num_candidates": 12}
    layout = replace(LAYOUTS[name], candidates=12)
    run, reference = _export(tmp_path, draft_bases, layout, **options)
    assert run.manifest.draft.num_candidates == 12
    if rank < 40 or name == "eagle1":  # whose head has 96 inputs and outputs
        left, singular, right = torch.linalg.svd(reference.head, full_matrices=False)
        reference.retrieval = left[:, :rank] * singular[:rank] @ right[:rank]
    drive(run, reference)


def test_options_of_a_low_rank_head_that_do_not_fit_are_rejected(draft_bases, tmp_path):
    own, plain = LAYOUTS["automodel_eagle4_of_fewer_tokens"], LAYOUTS["angelslim"]
    run, _ = _export(tmp_path / "own", draft_bases, own, num_candidates=9)
    assert run.manifest.draft.num_candidates == 9
    for layout, options, message in (
        (own, {"rank": 4}, "the draft has a low-rank head of rank 16"),
        (plain, {"num_candidates": 9}, "the draft has no low-rank head"),
        (plain, {"rank": 41}, r"the head \[40, 96\] has a smaller rank"),
    ):
        with pytest.raises(EdgeLLMError, match=message) as caught:
            _export(tmp_path / message[:9], draft_bases, layout, **options)
        assert caught.value.hint
        assert not (tmp_path / message[:9] / "bundle").exists()


class EngineRun(DraftRun):
    """The graphs lowered by the CPU backend, in float32."""

    def __post_init__(self) -> None:
        plan = Plan(
            max_input_len=16,
            kv_capacity=CAPACITY,
            threads=1,
            prefill="same",
            quantize="none",
            max_draft_tree_size=8,
        )
        engine = self.folder.parent / "engine"
        built = build_engine("draft", self.folder, engine, plan, "onnxruntime", lambda _: None)
        self.session = open_draft(engine / DRAFT_FOLDER, built)

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.session.fuse(taps.numpy()))

    def forward(self, ids, hidden, positions, mask, write_index, rows) -> list[np.ndarray]:
        result = self.session.run(
            ids.numpy(), hidden.numpy(), write_index, np.asarray(rows), top_k=K,
            position_ids=positions.numpy(), tree_mask=np.asarray(mask),
        )  # fmt: skip
        return [result.token_ids, result.log_probs, result.hidden]


class CudaRun(EngineRun):
    """The graphs lowered for CUDA, in the bundle's type."""

    def __post_init__(self) -> None:
        plan = Plan(
            max_input_len=16, kv_capacity=CAPACITY, threads=1, prefill="same", max_draft_tree_size=8
        )
        engine = self.folder.parent / "cuda"
        cuda_on_cpu.build_its_draft(self.folder, engine, plan)
        self.session = cuda_on_cpu.open_draft(engine)


@pytest.mark.each_change(
    "fp16-0.2-*-EngineRun",
    "fp16-0.2-speculators_*-CudaRun",
    "fp32-0.0002-eagle1-EngineRun",
    "fp32-0.0002-biases-CudaRun",
)
@pytest.mark.parametrize("lowered", [EngineRun, CudaRun])
@pytest.mark.parametrize(
    "name",
    [
        "biases",
        "eagle1",
        "automodel_eagle4",
        "modelopt_base_head",
        "speculators_peagle",
        "speculators_qwen3",
        "speculators_windows",
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", TOLERANCE), ("fp16", 0.2)])
def test_lowered_graphs_equal_the_reference(name, dtype, tolerance, lowered, draft_bases, tmp_path):
    run, reference = _export(tmp_path, draft_bases, LAYOUTS[name], dtype)
    drive(lowered(run.folder, run.manifest), reference, tolerance)


def test_float16_drafts_are_close_to_the_reference(draft_bases, tmp_path):
    run, reference = _export(tmp_path, draft_bases, LAYOUTS["specforge_eagle31"], "fp16")
    assert run.manifest.dtype == "float16"
    drive(run, reference, tolerance=5e-2)


def test_drafts_with_linear_rope_and_quantized_layers_equal_the_reference(draft_bases, tmp_path):
    from eagle_reference import make_tensors
    from safetensors.torch import save_file

    from edgellm.quantize.formats.modelopt import pack_int4

    scaling = {"rope_type": "linear", "factor": 4.0}
    layout = Layout({"draft_vocab_size": 40, "rope_scaling": scaling})
    draft = make_draft(tmp_path / "draft", layout)
    tensors, rounded = make_tensors(layout), make_tensors(layout)
    for name in ("midlayer.self_attn.q_proj", "midlayer.mlp.up_proj", "lm_head", "fc"):
        packed, scale = pack_int4(tensors[f"{name}.weight"].numpy(), 16)
        codes = np.stack([packed & 15, packed >> 4], 1).reshape(-1, packed.shape[1]).astype(int)
        codes[codes > 7] -= 16
        tensors[f"{name}.weight"] = torch.from_numpy(packed)
        tensors[f"{name}.weight_scale"] = torch.from_numpy(scale)
        rounded[f"{name}.weight"] = torch.from_numpy(
            (codes * np.repeat(scale, 16, axis=1)).astype(np.float32)
        )
    save_file(tensors, draft / "model.safetensors")
    (draft / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "W4A16_AWQ"}}')
    base = draft_bases[True]
    checkpoints = (open_checkpoint(str(folder), tokenizer=False) for folder in (draft, base))
    manifest = export_draft(*checkpoints, tmp_path / "bundle", DraftOptions("fp32"))
    assert manifest.quantization == "W4A16_AWQ"
    reference = Reference(draft, base, layout, linear=4.0)
    reference.tensors = rounded
    reference.head = rounded["lm_head.weight"]
    drive(DraftRun(tmp_path / "bundle", manifest), reference)


def test_the_embedding_keeps_its_name_and_a_quantized_base_lends_its_head(draft_bases, tmp_path):
    import onnx_ir as ir
    from harness.models.checkpoints import round_checkpoint

    round_checkpoint(str(draft_bases[False]), tmp_path / "base", 16)
    draft = make_draft(tmp_path / "draft", LAYOUTS["modelopt_base_head"])
    folders = (str(draft), str(tmp_path / "base"))
    checkpoints = (open_checkpoint(folder, tokenizer=False) for folder in folders)
    manifest = export_draft(*checkpoints, tmp_path / "bundle", DraftOptions("fp32"))
    initializers = ir.load(tmp_path / "bundle" / "model.onnx").graph.initializers
    assert initializers["embed_tokens.weight"].shape == ir.Shape((VOCAB, BASE_HIDDEN))
    assert initializers["lm_head.weight"].dtype == ir.DataType.INT4
    assert manifest.provenance["base"] == folders[1]
