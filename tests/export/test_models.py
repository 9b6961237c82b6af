"""All architectures at tiny random size against transformers: portable graph and engines."""

from __future__ import annotations

from pathlib import Path

import cuda_on_cpu
import numpy as np
import onnx_ir as ir
import pytest
from conftest import make_checkpoint
from model_configs import GEMMA4_EXPERTS
from portable import TOLERANCE, allowed, open_portable

from edgellm.build.engine import build_engine
from edgellm.build.lowering.experts import ExpertLayer
from edgellm.build.lowering.function_calls import find_calls
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.core.errors import UnsupportedModelError
from edgellm.core.graph_roles import DECODER
from edgellm.core.manifest import LLM_BUNDLE, LLM_ENGINE, load_bundle, load_engine
from edgellm.core.onnx_functions import SINK_ATTENTION
from edgellm.device_runtime.networks.decoder import DecoderNetwork, open_decoder
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.verify import load_reference, run_portable

CAPACITY = 64
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _tiny(model_type: str, **changes: object) -> dict[str, object]:
    return {**models.find(model_type).TINY, **changes}


def _rope(**parameters: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


VARIANTS = {
    # What this one does, two others do: the projections of qwen3_5_text, the rest of qwen3_next.
    **{name: _tiny(name) for name in models.supported() if name != "qwen3_5_moe_text"},
    "llama_untied_biases": _tiny(
        "llama", tie_word_embeddings=False, attention_bias=True, mlp_bias=True
    ),
    "gemma3_capped": _tiny("gemma3_text", final_logit_softcapping=4.0, attention_bias=True),
    "gemma4_equal_kv": _tiny(
        "gemma4_text",
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        head_dim=16,
        global_head_dim=40,
        attention_bias=True,
    ),
    "gemma4_experts": GEMMA4_EXPERTS,
    "gemma4_shared_alone": _tiny(
        "gemma4_text",
        num_kv_shared_layers=3,
        use_double_wide_mlp=False,
        global_head_dim=32,
        final_logit_softcapping=None,
        tie_word_embeddings=False,
    ),
    "phi3_plain": _tiny("phi3", rope_parameters=None, partial_rotary_factor=1.0),
    "phi3_beyond_its_original_length": _tiny("phi3", original_max_position_embeddings=16),
    "exaone4_without_window": _tiny(
        "exaone4", sliding_window=None, layer_types=["full_attention"] * 3
    ),
    "olmo2_biases": _tiny("olmo2", attention_bias=True),
    "llama_head_dim": _tiny("llama", head_dim=48),
    "llama_multi_head": _tiny("llama", num_key_value_heads=6),
    "llama3_rope": _tiny("llama", **_rope(**_LLAMA3, original_max_position_embeddings=16)),
    "linear_rope": _tiny("llama", **_rope(rope_type="linear", factor=4.0)),
    "yarn_rope": _tiny(
        "qwen2", **_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
    ),
    "mistral_without_window": _tiny("mistral", sliding_window=None),
    "minicpm3_without_rank": _tiny(
        "minicpm3",
        q_lora_rank=None,
        attention_bias=True,
        scale_depth=None,
        dim_model_base=None,
        **_rope(
            rope_type="longrope",
            original_max_position_embeddings=64,
            short_factor=[1.0 + 0.1 * index for index in range(8)],
            long_factor=[2.0 + index for index in range(8)],
        ),
    ),
    "muse_glimmer_tied_biases": _tiny(
        "muse_glimmer_text",
        tie_word_embeddings=True,
        attention_bias=True,
        num_hidden_layers=3,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        layer_rope_theta=[500, 500, 0],
        rope_parameters={"rope_type": "linear", "rope_theta": 500, "factor": 2.0},
    ),
    # All kinds of kernels compute it, since it has no experts.
    "kimi_linear_dense": _tiny(
        "kimi_linear",
        q_lora_rank=24,
        attention_bias=True,
        mlp_layer_types=["dense"] * 3,
        linear_num_heads=3,
        linear_head_dim=20,
        linear_conv_kernel_dim=3,
    ),
    "granitemoe_untied": _tiny("granitemoe", tie_word_embeddings=False, attention_bias=True),
    "qwen2_moe_gelu": _tiny("qwen2_moe", hidden_act="gelu_pytorch_tanh"),
    "qwen3_biases": _tiny("qwen3", attention_bias=True, tie_word_embeddings=False),
}

# Their keys have the same effect in other variants.
REPEATS = {
    "gemma3_capped",
    "phi3_plain",
    "exaone4_without_window",
    "olmo2_biases",
    "llama_multi_head",
    "mistral_without_window",
    "granitemoe_untied",
    "qwen2_moe_gelu",
    "qwen3_biases",
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.nightly] * (name in REPEATS), id=name)
        for name in VARIANTS
    ],
)
def exported(request, tmp_path_factory) -> tuple[Path, Path]:
    """A checkpoint and its float32 bundle."""
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = make_checkpoint(folder / "checkpoint", **VARIANTS[request.param])
    export_llm(open_checkpoint(str(checkpoint)), folder / "bundle", ExportOptions(dtype="fp32"))
    return checkpoint, folder / "bundle"


@pytest.fixture(scope="module", params=["portable", "edgellm", "onnxruntime", "cuda"])
def session(request, exported) -> DecoderNetwork:
    bundle = exported[1]
    if request.param == "portable":
        return open_portable(bundle, CAPACITY)
    engine = bundle.parent / request.param
    if request.param == "cuda":
        spec = load_bundle(bundle, LLM_BUNDLE).decoder
        if spec.recurrent is not None or not spec.has_uniform_layers:
            pytest.skip("refused, as test_recurrent_state.py and test_gemma4.py have it")
        plan = Plan(max_input_len=48, kv_capacity=CAPACITY, threads=1, prefill="auto")
        if any(layer.cubic for layer in ExpertLayer.all_of(_graph(bundle))):
            with pytest.raises(UnsupportedModelError, match="experts with GELU are not computed"):
                cuda_on_cpu.build_base(bundle, engine, plan)
            pytest.skip("experts with GELU are refused")
        with cuda_on_cpu.fused_in_float32():
            cuda_on_cpu.build_base(bundle, engine, plan)
        return cuda_on_cpu.open_base(engine)
    plan = Plan(
        max_input_len=48,
        kv_capacity=CAPACITY,
        threads=1,
        prefill="auto",
        options=CpuOptions(request.param),
    )
    if request.param == "onnxruntime" and (reason := _refused(bundle)):
        with pytest.raises(UnsupportedModelError, match=reason):
            build_engine("llm", bundle, engine, plan, "onnxruntime", lambda _: None)
        pytest.skip(reason)
    build_engine("llm", bundle, engine, plan, "onnxruntime", lambda _: None)
    manifest = load_engine(engine, LLM_ENGINE)
    return open_decoder(engine, manifest)


def _graph(bundle: Path) -> ir.Graph:
    graph = load_bundle(bundle, LLM_BUNDLE).graphs[DECODER]
    return ir.load(bundle / graph.path).graph


def _refused(bundle: Path) -> str:
    """Why an engine without edgellm's kernels does not compute a model; empty: it does."""
    graph = _graph(bundle)
    if ExpertLayer.all_of(graph):
        return "does not compute mixtures of experts"
    has_sinks = find_calls(graph, SINK_ATTENTION)
    return "does not compute attention with sinks" if has_sinks else ""


@pytest.fixture(scope="module")
def reference(exported):
    """Logits of transformers for a list of token ids, and such a list."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(exported[0], attn_implementation="eager")
    token_ids = np.random.default_rng(1).integers(9, 96, 40)

    def logits(ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.from_numpy(np.asarray(ids))[None]).logits[0].numpy()

    return logits, token_ids


def _run(session: DecoderNetwork, ids: np.ndarray, chunks: list[int]) -> np.ndarray:
    logits, begin = [], 0
    for size in chunks:
        result = session.run(ids[begin : begin + size], begin, np.arange(size))
        logits.append(result.logits.copy())
        begin += size
    return np.concatenate(logits)


@pytest.mark.each_change("edgellm-*-chunked_prefill", "*-llama-*")
@pytest.mark.parametrize(
    "chunks",
    [[40], [20, *[1] * 20], [7, 1, 13, 1, 1, 17]],
    ids=["prefill", "decode", "chunked_prefill"],
)
def test_logits_equal_transformers(session, exported, reference, chunks):
    logits, ids = reference
    found, expected = _run(session, ids, chunks), logits(ids)
    assert np.abs(expected).max() > 1  # the comparison means something
    np.testing.assert_allclose(found, expected, atol=allowed(exported[0], expected))
    assert (found.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.each_change(
    "*-llama",
    "edgellm-gemma3_text",
    "edgellm-gemma4_*",
    "edgellm-qwen3_5_text",
    "edgellm-qwen3_moe",
    "edgellm-kimi_linear_dense",
    "edgellm-muse_glimmer_tied_biases",
    "portable-qwen3_5_text",
    "portable-gemma4_text",
    "onnxruntime-qwen3_5_text",
    "cuda-gemma3_text",
    "cuda-qwen3_moe",
)
def test_tree_nodes_attend_to_their_ancestors_only(session, exported, reference):
    logits, ids = reference
    prompt, tree_ids = ids[:20], np.array([30, 31, 32, 33, 34])
    parents = [-1, 0, 0, 1, 2]  # two branches below the root
    mask = np.eye(5, dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    depth = mask.sum(1) - 1
    session.run(prompt, 0, np.array([19]))
    found = session.run(
        tree_ids, 20, np.arange(5), position_ids=20 + depth, tree_mask=mask
    ).logits.copy()
    for node in range(5):
        path = np.concatenate([prompt, tree_ids[np.flatnonzero(mask[node])]])
        expected = logits(path)[-1]
        np.testing.assert_allclose(found[node], expected, atol=allowed(exported[0], expected))


@pytest.mark.each_change(
    "llama", "gemma3_text", "gemma4_text", "qwen3_5_text", "qwen3_moe", "gemma4_experts"
)
def test_portable_graph_runs_without_the_runtime(exported, reference):

    logits, ids = reference
    manifest = load_bundle(exported[1], LLM_BUNDLE)
    found = run_portable(exported[1], manifest, ids, 30)
    expected = logits(ids)
    np.testing.assert_allclose(found, expected, atol=allowed(exported[0], expected))


@pytest.mark.each_change("fp32-bfloat16", "fp16-float32", "fp16-bfloat16")
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("graph", ["fp32", "fp16"])
def test_logits_are_close_for_every_stored_and_computed_type(tmp_path, stored, graph):
    """All six pairs of types agree with transformers, within their precision."""
    import torch
    from transformers import AutoModelForCausalLM

    checkpoint = make_checkpoint(tmp_path / "checkpoint", dtype=stored, **_tiny("qwen2"))
    manifest = export_llm(
        open_checkpoint(str(checkpoint)), tmp_path / "bundle", ExportOptions(dtype=graph)
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = np.random.default_rng(2).integers(9, 96, 24)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    found = run_portable(tmp_path / "bundle", manifest, ids, 16)
    engine = tmp_path / "engine"
    build_engine(
        "llm",
        tmp_path / "bundle",
        engine,
        Plan(max_input_len=32, kv_capacity=48, threads=1, prefill="auto"),
        "onnxruntime",
        lambda _: None,
    )
    session = open_decoder(engine, load_engine(engine, LLM_ENGINE))
    # The CPU engine computes in float32 even of a float16 bundle; only its weights are rounded.
    np.testing.assert_allclose(found, expected, atol=TOLERANCE if graph == "fp32" else 5e-2)
    rounded = graph == "fp16" and stored != "float16"
    tolerance = 2e-2 if rounded else TOLERANCE
    np.testing.assert_allclose(_run(session, ids, [16, *[1] * 8]), expected, atol=tolerance)


@pytest.mark.parametrize("model_type", ["llama", "falcon_h1", "nemotron_h"])
def test_cut_models_keep_their_first_layers(tmp_path, model_type):
    """Exported layers equal the first layers of transformers, as in `--verify`."""
    import torch

    checkpoint = make_checkpoint(tmp_path / "checkpoint", **_tiny(model_type))
    options = ExportOptions(dtype="fp32", num_layers=2)
    manifest = export_llm(open_checkpoint(str(checkpoint)), tmp_path / "bundle", options)
    model = load_reference(checkpoint, manifest.decoder, options.num_layers)
    ids = np.arange(9, 30)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    found = run_portable(tmp_path / "bundle", manifest, ids, 10)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
