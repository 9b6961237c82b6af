"""Every public layout of a draft: the graphs on ONNX Runtime against a reference in torch."""

from __future__ import annotations

from pathlib import Path

import cuda_on_cpu
import numpy as np
import pytest
import torch
from conftest import make_checkpoint
from draft_runs import CAPACITY, TOLERANCE, DraftRun, K, drive
from eagle_reference import (
    BASE_HIDDEN,
    BASE_LAYERS,
    VOCAB,
    Layout,
    Reference,
    make_draft,
)

from edgellm.artifact import verify_files
from edgellm.build.onnxruntime_cpu.compiler import float32_spec
from edgellm.build.onnxruntime_cpu.draft_compiler import compile_draft
from edgellm.build.plan import Plan
from edgellm.contract import DraftBundleManifest, load_manifest
from edgellm.device_runtime.runners.onnxruntime_cpu.session import (
    OnnxRuntimeDraftSession,
)
from edgellm.device_runtime.runners.onnxruntime_graphs import load_graph
from edgellm.export import models
from edgellm.export.draft import DraftOptions, export_draft
from edgellm.export.source import open_checkpoint

BASE = {**models.find("llama").TINY, "num_hidden_layers": BASE_LAYERS}
_MODELOPT = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True,
    "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None,
}  # fmt: skip
_SPECFORGE = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40}
_AUX = "eagle_aux_hidden_state_layer_ids"
_SPECULATORS = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0", "speculators_config": {"algorithm": "eagle3"},
    "draft_vocab_size": 40, "model_type": "speculator_model",
}  # fmt: skip

LAYOUTS = {
    "safeailab_bin": Layout(
        {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 40}, file="pytorch_model.bin"
    ),
    "safeailab_narrow": Layout(
        {"draft_vocab_size": 40, "target_hidden_size": 96}, hidden=48, head_dim=8,
        own_embedding=True,
    ),
    "safeailab_full_vocabulary": Layout(
        {"draft_vocab_size": VOCAB}, draft_vocab=VOCAB, d2t=False, t2d=False
    ),
    "angelslim": Layout(
        {"architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": 40, "rope_theta": 1e6,
         "tie_word_embeddings": True, "use_sliding_window": False, "max_window_layers": 28},
        rope_theta=1e6,
    ),
    "specforge_sharded": Layout(
        {**_SPECFORGE, "eagle_config": {_AUX: [0, 3, 5], "use_aux_hidden_state": True}},
        taps=(1, 4, 6), head_dim=24, file="sharded",
    ),
    "specforge_eagle31": Layout(
        {**_SPECFORGE, "fc_norm": True, "norm_output": True}, fc_norm=True, norm_output=True
    ),
    "modelopt_base_head": Layout(
        {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": None,
         "eagle_config": {_AUX: [1, 3, 4], **_MODELOPT}},
        first="layers.0", own_head=False, draft_vocab=VOCAB, d2t=False, t2d=False, layers=2,
        tied_base=False,
    ),
    "modelopt_without_t2d": Layout(
        {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40,
         "eagle_config": _MODELOPT},
        first="layers.0", t2d=False,
    ),
    "speculators_qwen3": Layout(
        {**_SPECULATORS, _AUX: [1, 3, 4], "norm_before_fc": True,
         "embed_requires_grad": True},
        inner_config={"model_type": "qwen3", "rope_theta": 5e5}, rope_theta=5e5, taps=(1, 3, 4),
        first="layers.0", qk_norm=True, norm_before_residual=True, norm_before_fc=True,
        own_embedding=True,
    ),
    "speculators_llama": Layout(
        {**_SPECULATORS, "norm_before_residual": False, "fc_norm": True}, inner_config={},
        first="layers.0", fc_norm=True, layers=2,
    ),
    "biases": Layout(
        {"draft_vocab_size": 40, "bias": True}, fc_bias=True, qkv_bias=True
    ),
    "five_taps": Layout(
        {**_SPECFORGE, "norm_before_residual": True, "eagle_config": {_AUX: [0, 1, 3, 5, 6]}},
        taps=(1, 2, 4, 6, 7), norm_before_residual=True,
    ),
    "modelopt_norms": Layout(
        {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40,
         "eagle_config": {**_MODELOPT, "norm_before_fc": True, "return_hidden_post_norm": True}},
        norm_before_fc=True, norm_output=True,
    ),
    "eagle1": Layout(
        {"architectures": ["LlamaForCausalLM"]}, first="layers.0", eagle1=True, taps=(8,),
        own_embedding=True, own_head=False, draft_vocab=VOCAB, d2t=False, t2d=False, fc_bias=True,
        file="pytorch_model.bin", tied_base=False,
    ),
    "eagle1_without_bias": Layout(
        {"bias": False}, first="layers.0", eagle1=True, taps=(8,), own_head=False,
        draft_vocab=VOCAB, d2t=False, t2d=False, layers=2, qkv_bias=True,
    ),
}  # fmt: skip
EXPORTERS = {
    "safeailab": "SafeAILab", "angelslim": "AngelSlim", "specforge": "SpecForge",
    "modelopt": "ModelOpt", "speculators": "speculators", "eagle1": "SafeAILab",
    "biases": "SafeAILab", "five": "SpecForge",
}  # fmt: skip


@pytest.fixture(scope="session")
def draft_bases(tmp_path_factory) -> dict[bool, Path]:
    """Bases of eight layers, by whether their head is tied to the embedding."""
    folder = tmp_path_factory.mktemp("draft_bases")
    return {
        tied: make_checkpoint(folder / str(tied), **{**BASE, "tie_word_embeddings": tied})
        for tied in (True, False)
    }


@pytest.fixture(params=LAYOUTS, ids=str)
def layout_name(request) -> str:
    return request.param


def _export(tmp_path, bases, layout, dtype="fp32") -> tuple[DraftRun, Reference]:
    draft = make_draft(tmp_path / "draft", layout)
    base = bases[layout.tied_base]
    checkpoints = (open_checkpoint(str(folder), tokenizer=False) for folder in (draft, base))
    export_draft(*checkpoints, tmp_path / "bundle", DraftOptions(dtype))
    manifest = load_manifest(tmp_path / "bundle", DraftBundleManifest)
    return DraftRun(tmp_path / "bundle", manifest), Reference(draft, base, layout)


def test_graphs_equal_the_reference(layout_name, draft_bases, tmp_path):
    layout = LAYOUTS[layout_name]
    run, reference = _export(tmp_path, draft_bases, layout)
    spec = run.manifest.draft
    assert spec.method == ("eagle" if layout.eagle1 else "eagle3")
    assert spec.fuses is not layout.eagle1
    assert spec.hidden_taps == layout.taps
    assert (spec.draft_vocab_size, spec.decoder.vocab_size) == (layout.draft_vocab, VOCAB)
    assert (spec.base_hidden_size, spec.base_num_layers) == (BASE_HIDDEN, BASE_LAYERS)
    assert (spec.decoder.hidden_size, spec.decoder.kv.num_layers) == (layout.hidden, layout.layers)
    assert run.manifest.provenance["exporter"] == EXPORTERS[layout_name.split("_")[0]]
    verify_files(run.folder, run.manifest.files)
    assert ("fuse.onnx" in run.manifest.files) is spec.fuses
    drive(run, reference)


class EngineRun(DraftRun):
    """The graphs as the CPU backend lowers them, in float32."""

    def __post_init__(self) -> None:
        plan = Plan(16, CAPACITY, 1, "same", quantize="none", max_draft_tree_size=8)
        engine = self.folder.parent / "engine"
        engine.mkdir()
        compile_draft(self.folder, self.manifest, plan, engine, lambda _: None)
        spec = float32_spec(self.manifest.draft.decoder)
        model, fuse = (
            load_graph(engine / f"{name}.onnx", threads=1)
            if (engine / f"{name}.onnx").exists()
            else None
            for name in ("draft", "fuse")
        )
        assert model is not None
        self.session = OnnxRuntimeDraftSession(model, fuse, spec, CAPACITY)

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.session.fuse(taps.numpy()))

    def forward(self, ids, hidden, positions, mask, write_index, rows) -> list[np.ndarray]:
        result = self.session.run(
            ids.numpy(), hidden.numpy(), write_index, np.asarray(rows), top_k=K,
            position_ids=positions.numpy(), tree_mask=np.asarray(mask),
        )  # fmt: skip
        return [result.token_ids, result.log_probs, result.hidden]


class CudaRun(EngineRun):
    """The graphs as they are lowered for CUDA, in the bundle's own type."""

    def __post_init__(self) -> None:
        plan = Plan(16, CAPACITY, 1, "same", max_draft_tree_size=8)
        engine = self.folder.parent / "cuda"
        cuda_on_cpu.build_its_draft(self.folder, engine, plan)
        self.session = cuda_on_cpu.open_draft(engine)


@pytest.mark.parametrize("lowered", [EngineRun, CudaRun])
@pytest.mark.parametrize(
    "name", ["biases", "eagle1", "eagle1_without_bias", "modelopt_base_head", "speculators_qwen3"]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", TOLERANCE), ("fp16", 0.2)])
def test_lowered_graphs_equal_the_reference(name, dtype, tolerance, lowered, draft_bases, tmp_path):
    run, reference = _export(tmp_path, draft_bases, LAYOUTS[name], dtype)
    drive(lowered(run.folder, run.manifest), reference, tolerance)


def test_half_precision(draft_bases, tmp_path):
    run, reference = _export(tmp_path, draft_bases, LAYOUTS["specforge_eagle31"], "fp16")
    assert run.manifest.dtype == "float16"
    drive(run, reference, tolerance=5e-2)


def test_linear_rope_and_quantized_layers(draft_bases, tmp_path):
    from eagle_reference import make_tensors
    from safetensors.torch import save_file

    from edgellm.quantize.formats import pack_int4

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
    from weights import round_checkpoint

    round_checkpoint(str(draft_bases[False]), tmp_path / "base", 16)
    draft = make_draft(tmp_path / "draft", LAYOUTS["modelopt_base_head"])
    folders = (str(draft), str(tmp_path / "base"))
    checkpoints = (open_checkpoint(folder, tokenizer=False) for folder in folders)
    manifest = export_draft(*checkpoints, tmp_path / "bundle", DraftOptions("fp32"))
    initializers = ir.load(tmp_path / "bundle" / "model.onnx").graph.initializers
    assert initializers["embed_tokens.weight"].shape == ir.Shape((VOCAB, BASE_HIDDEN))
    assert initializers["lm_head.weight"].dtype == ir.DataType.INT4
    assert manifest.provenance["base"] == folders[1]
