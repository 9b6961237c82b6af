"""Vision-language checkpoints: only the decoder is quantized."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from quantize_cases import load, make_job, write_text
from vlm_engines import make_vlm

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.core.manifest import LLM_ENGINE, load_engine
from edgellm.device_runtime.networks.decoder import open_decoder
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.visual import VisualOptions, export_visual
from edgellm.quantize.pipeline.run import run_job

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CASES = {
    "qwen2_5_vl": ("int4_awq", {"lm_head_quantization": "fp8"}),
    "qwen3_vl": ("nvfp4", {}),
    "qwen3_5": ("int4_awq", {"algo": "gptq"}),
    "internvl": ("fp8", {"kv_cache_quantization": "int8"}),
    "muse_glimmer": ("int4_awq", {}),
    "smolvlm": ("int8_sq", {}),
    # The same mechanisms over other names, every night
    "qwen2_vl": ("int4_awq", {}),
    "qwen3_vl_moe": ("int4_awq", {}),
    "qwen3_5_moe": ("fp8", {}),
    "idefics3": ("fp8", {}),
    "gemma3": ("int4_awq", {}),
    "gemma4": ("fp8", {}),
    "gemma4_unified": ("fp8", {}),
    "mistral3": ("int8_sq", {}),
    "lfm2_vl": ("int4_awq", {}),
    "lfm3_vl": ("fp8", {}),
    "cosmos3_edge": ("int4_awq", {}),
    "minicpmv4_6": ("int4_awq", {}),
}
# Name prefixes of the decoder and of all other tensors, as transformers writes them
TEXT = {
    "qwen2_5_vl": "model.",
    "qwen3_vl": "model.language_model.",
    "qwen3_5": "model.language_model.",
    "internvl": "language_model.model.",
    "muse_glimmer": "model.language_model.",
    "smolvlm": "model.text_model.",
    "qwen2_vl": "model.",
    "idefics3": "model.text_model.",
    "gemma3": "language_model.model.",
    "mistral3": "language_model.model.",
    "cosmos3_edge": "",
}
TEXT |= {family: "model.language_model." for family in CASES if family not in TEXT}
SEEING = {
    "qwen2_5_vl": {"visual*"},
    "qwen3_vl": {"model.visual*"},
    "qwen3_5": {"model.visual*"},
    "internvl": {"vision_tower*", "multi_modal_projector*"},
    "muse_glimmer": {"model.vision_tower*", "model.vision_adapter*", "model.vision_projection*"},
    "smolvlm": {"model.vision_model*", "model.connector*"},
    "qwen2_vl": {"visual*"},
    "qwen3_vl_moe": {"model.visual*"},
    "qwen3_5_moe": {"model.visual*"},
    "idefics3": {"model.vision_model*", "model.connector*"},
    "gemma3": {"vision_tower*", "multi_modal_projector*"},
    "gemma4": {"model.vision_tower*", "model.embed_vision*"},
    "gemma4_unified": {"model.vision_embedder*", "model.embed_vision*"},
    "mistral3": {"vision_tower*", "multi_modal_projector*"},
    "lfm2_vl": {"model.vision_tower*", "model.multi_modal_projector*"},
    "lfm3_vl": {"model.vision_tower*", "model.multi_modal_projector*"},
    "cosmos3_edge": {"model.visual*", "model.projector*"},
    "minicpmv4_6": {"model.vision_tower*", "model.merger*"},
}
HEADS = {"mistral3": "language_model.lm_head"}
DECAYING = ("qwen3_5", "qwen3_5_moe", "minicpmv4_6")
# A quantized layer of the first block, if not this one
LAYERS = {
    "lfm2_vl": "feed_forward.w2",
    "lfm3_vl": "feed_forward.w2",
    "qwen3_vl_moe": "self_attn.o_proj",
    "qwen3_5_moe": "mlp.shared_expert.down_proj",
}


@pytest.fixture(scope="module", params=sorted(CASES))
def pair(request, tmp_path_factory) -> tuple[str, Path, Path]:
    """Return a family, its float checkpoint and the quantized one."""
    folder = tmp_path_factory.mktemp(request.param)
    source = make_vlm(folder / "float", request.param, **SIZES)
    scheme, changes = CASES[request.param]
    job = make_job(source, write_text(folder / "text.jsonl"), folder / "out", scheme, **changes)
    run_job(job, lambda *_: None)
    return request.param, source, folder / "out"


def test_names_stay_and_other_tensors_are_unchanged(pair):
    family, source, output = pair
    before, after = load(source), load(output)
    parts = tuple(part.removesuffix("*") for part in SEEING[family])
    seeing = {name for name in before if name.startswith(parts)}
    assert len(seeing) >= 10
    for name in seeing:
        np.testing.assert_array_equal(after[name], before[name])
    lost = {name for name in set(before) - set(after) if ".experts." not in name}  # split
    assert lost <= {"lm_head.weight"}
    layer = f"{TEXT[family]}layers.0.{LAYERS.get(family, 'mlp.down_proj')}"
    assert f"{layer}.weight_scale" in after
    assert after[f"{layer}.weight"].dtype != before[f"{layer}.weight"].dtype
    own = (TEXT[family], "lm_head")
    assert all(name.startswith(own) for name in set(after) - set(before))


def test_configs_describe_the_quantization(pair):
    family, source, output = pair
    config = json.loads((output / "config.json").read_text())
    assert config["model_type"] == family
    assert (
        config["vision_config"] == json.loads((source / "config.json").read_text())["vision_config"]
    )
    described = json.loads((output / "hf_quant_config.json").read_text())["quantization"]
    if family == "qwen2_5_vl":
        assert described["quantized_layers"]["lm_head"]["quant_algo"] == "FP8"
        assert f"{TEXT[family]}layers.1.self_attn.q_proj" in described["quantized_layers"]
    else:
        head = {HEADS.get(family, "lm_head"), f"{TEXT[family]}embed_tokens"}
        found = set(described["exclude_modules"])
        decays = {name for name in found if re.search(r"in_proj_[ab]$", name)}
        assert (len(decays) > 0) == (family in DECAYING)  # these set the decay of states
        routers = {name for name in found if re.search(r"mlp\.(shared_expert_)?gate$", name)}
        assert (len(routers) > 0) == family.endswith("moe")
        by_layer = {name for name in found if "per_layer" in name}
        assert (len(by_layer) > 0) == (family == "gemma4")  # embeddings by layer stay float
        assert found - decays - routers - by_layer == head | SEEING[family]
    assert (output / "preprocessor_config.json").exists()


def test_both_parts_export(pair, tmp_path):
    """The decoder's output is near the float one, the encoder's is equal."""
    _, source, output = pair
    ids, logits, encoders = np.arange(40, 70), [], []
    for place in (source, output):
        checkpoint = open_checkpoint(str(place))
        export_llm(checkpoint, tmp_path / place.name, ExportOptions(dtype="fp32"))
        engine, plan = (
            tmp_path / f"{place.name}-engine",
            Plan(max_input_len=32, kv_capacity=40, threads=1, prefill="same", quantize="none"),
        )
        build_engine("llm", tmp_path / place.name, engine, plan, "onnxruntime", lambda _: None)
        manifest = load_engine(engine, LLM_ENGINE)
        session = open_decoder(engine, manifest)
        logits.append(session.run(ids, 0, np.arange(30)).logits.copy())
        export_visual(checkpoint, tmp_path / f"{place.name}-visual", VisualOptions("fp32"))
        encoders.append((tmp_path / f"{place.name}-visual" / "model.weights").read_bytes())
    assert encoders[0] == encoders[1]
    assert manifest.quantization != "none"
    distance = np.linalg.norm(logits[1] - logits[0]) / np.linalg.norm(logits[0])
    assert 1e-3 < distance < 0.8
