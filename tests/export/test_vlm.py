"""Text towers of vision-language models against transformers: images, M-RoPE, DeepStack."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda_on_cpu
import numpy as np
import pytest
import torch
from conftest import write_tokenizer
from portable import open_portable

from edgellm.build.engine import build_engine
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.core.errors import UnsupportedModelError
from edgellm.core.manifest import LLM_BUNDLE, LLM_ENGINE, load_bundle, load_engine
from edgellm.device_runtime.arrays import ImageRows
from edgellm.device_runtime.networks.decoder import DecoderNetwork, open_decoder
from edgellm.export import models
from edgellm.export.checkpoints import vlm
from edgellm.export.checkpoints.checkpoint import Checkpoint
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.verify import verify_bundle

TOLERANCE = 2e-4
CAPACITY, VOCABULARY, HIDDEN, IMAGE_TOKEN = 64, 96, 96, 9
_TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 80,
    "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
}  # fmt: skip
_QWEN_VISION = {"depth": 1, "embed_dim": 32, "hidden_size": HIDDEN, "num_heads": 2, "patch_size": 4}
_MROPE = {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [2, 3, 3]}
_TILES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}
_VISION_LAYERS = {key: _TILES[key] for key in _TILES if "size" in key and key != "image_size"}
_VISION_LAYERS |= {"num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN3_5 = {
    **_TEXT, "initializer_range": 0.07, "head_dim": 32, "full_attention_interval": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "rope_parameters": {
        "rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2], "mrope_interleaved": True,
    },
}  # fmt: skip
_QWEN3_5_VISION = {
    "depth": 1, "hidden_size": 32, "out_hidden_size": HIDDEN, "num_heads": 2, "patch_size": 4,
    "intermediate_size": 32,
}  # fmt: skip
_GEMMA4 = {
    **_TEXT, "head_dim": 32, "global_head_dim": 48, "sliding_window": 8,
    "layer_types": [*["sliding_attention", "full_attention"] * 2],
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {
            **_TEXT, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 8,
            "layer_types": [*["sliding_attention", "full_attention"] * 2],
        },
        "vision_config": _TILES, "mm_tokens_per_image": 16,
    },
    "gemma4": {
        "text_config": {
            **_GEMMA4, "num_kv_shared_layers": 1, "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY,
        },
        "vision_config": {**_VISION_LAYERS, "num_key_value_heads": 2, "patch_size": 4},
        "video_token_id": 8, "audio_token_id": 7, "initializer_range": 0.2,
    },
    "gemma4_31b": {
        "text_config": {
            **_GEMMA4, "use_bidirectional_attention": "vision", "attention_k_eq_v": True,
            "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
        },
        "vision_config": {**_VISION_LAYERS, "num_key_value_heads": 2, "patch_size": 4},
        "video_token_id": 8, "audio_token_id": 7, "initializer_range": 0.2,
    },
    "gemma4_unified": {
        "text_config": {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        "vision_config": {"patch_size": 4, "mm_embed_dim": 32, "output_proj_dims": 32},
        "video_token_id": 8, "audio_token_id": 7, "initializer_range": 0.2,
    },
    "qwen2_vl": {
        "text_config": {**_TEXT, "rope_parameters": _MROPE}, "vision_config": _QWEN_VISION
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": {**_QWEN_VISION, "hidden_size": 32, "out_hidden_size": HIDDEN,
                          "intermediate_size": 32},
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, "head_dim": 32, "rope_parameters": {
            "rope_theta": 10000.0, "rope_type": "default", "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        }},
        "vision_config": {
            **_QWEN_VISION, "depth": 3, "hidden_size": 32, "out_hidden_size": HIDDEN,
            "intermediate_size": 32, "deepstack_visual_indexes": [0, 1],
        },
    },
    "qwen3_vl_moe": {
        "text_config": {
            **_TEXT, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 40, "rope_parameters": {
                "rope_theta": 10000.0, "rope_type": "default", "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            **_QWEN_VISION, "depth": 2, "hidden_size": 32, "out_hidden_size": HIDDEN,
            "intermediate_size": 32, "deepstack_visual_indexes": [0],
        },
    },
    "qwen3_5": {"text_config": _QWEN3_5, "vision_config": _QWEN3_5_VISION},
    "qwen3_5_moe": {
        "text_config": {**models.find("qwen3_5_moe_text").TINY, **_QWEN3_5, "num_experts": 4,
                        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                        "shared_expert_intermediate_size": 32},
        "vision_config": _QWEN3_5_VISION,
    },
    "internvl": {
        "text_config": {"model_type": "qwen3", "head_dim": 16, **_TEXT},  # InternVL 3.5
        "vision_config": {**_TILES, "patch_size": [4, 4], "image_size": [16, 16]},
        "image_seq_length": 4,
    },
    "mistral3": {
        "text_config": {"model_type": "ministral3", **_TEXT, "head_dim": 32,
                        "rope_parameters": models.find("ministral3").TINY["rope_parameters"]},
        "vision_config": {"model_type": "pixtral", **_TILES},
    },
    "muse_glimmer": {
        "text_config": {**_TEXT, "head_dim": 32, "sliding_window": 8},
        "vision_config": {**_VISION_LAYERS, "patch_size": 4, "pos_emb_height": 4,
                          "pos_emb_width": 4},
        "out_hidden_size": 128, "projector_hidden_size": 40, "video_token_id": 8,
    },
    "lfm2_vl": {
        "text_config": {
            **{key: _TEXT[key] for key in _TEXT if key != "rms_norm_eps"},
            "initializer_range": 0.07, "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"] * 2,
        },
        "vision_config": {**_VISION_LAYERS, "num_patches": 16, "patch_size": 4},
    },
    "cosmos3_edge": {
        "text_config": {
            **_TEXT, "head_dim": 32, "rope_parameters": {
                "rope_theta": 10000.0, "rope_type": "default", "mrope_section": [6, 5, 5],
            },
        },
        "vision_config": {**_VISION_LAYERS, "num_patches": 16, "patch_size": 4},
        "initializer_range": 0.2,
    },
    "lfm3_vl": {
        "text_config": {
            **{key: _TEXT[key] for key in _TEXT if key != "rms_norm_eps"},
            "model_type": "lfm3", "initializer_range": 0.07, "head_dim": 32,
            "layer_types": ["conv", "full_attention"] * 2,
        },
        "vision_config": {**_VISION_LAYERS, "num_key_value_heads": 2, "patch_size": 4},
    },
    "minicpmv4_6": {
        "text_config": {"model_type": "qwen3_5_text", **_QWEN3_5},  # with axes that images lack
        "vision_config": {**_TILES, "model_type": "minicpmv4_6_vision"}, "insert_layer_id": 0,
    },
    "minicpmv4_7": {
        "text_config": {"model_type": "qwen3_5_text", **_QWEN3_5},
        "vision_config": {**_TILES, "model_type": "minicpmv4_7_vision"}, "insert_layer_id": 0,
    },
    "idefics3": {"text_config": {"model_type": "llama", **_TEXT}, "vision_config": _TILES},
    "smolvlm": {"text_config": {"model_type": "llama", **_TEXT}, "vision_config": _TILES},
}  # fmt: skip
_MODEL_TYPES = {"gemma4_31b": "gemma4"}  # of other forms of a family


@dataclass(frozen=True)
class Prompt:
    """Text, an image of 3 x 4 tokens, text, an image of 2 x 2, text; ids as in requests."""

    ids: np.ndarray  # [S]
    positions: np.ndarray  # [3, S]
    embeds: np.ndarray  # [N, H]
    deepstack: np.ndarray  # [L, N, H]

    @classmethod
    def make(cls, num_deepstack: int) -> Prompt:
        random = np.random.default_rng(3)
        ids = random.integers(10, VOCABULARY, 40)
        images = np.r_[7:19, 25:29]
        ids[images] = VOCABULARY + np.arange(16)
        # What matters here is that axes differ; real positions are tested where they are made.
        positions = np.sort(random.integers(0, 40, (3, 40)), axis=1)
        positions[:, 0] = 0
        positions[:, 35:] = positions[:, :35].max() + 1 + np.arange(5)  # generated
        normal = random.standard_normal
        deepstack = normal((num_deepstack, 16, HIDDEN), np.float32)
        return cls(ids, positions, normal((16, HIDDEN), np.float32), deepstack)


def _save(family: str, folder: Path) -> Any:
    """A model with random weights, saved to `folder`."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    model_type = _MODEL_TYPES.get(family, family)
    config = AutoConfig.for_model(
        model_type, **CONFIGS[family], image_token_id=IMAGE_TOKEN, tie_word_embeddings=False
    )
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCABULARY)
    return model


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def exported(request, tmp_path_factory):
    """A model of transformers and its bundle."""
    folder = tmp_path_factory.mktemp(request.param)
    model = _save(request.param, folder / "checkpoint")
    options = ExportOptions(dtype="fp32", hidden_taps=(1, 2, 4))
    export_llm(open_checkpoint(str(folder / "checkpoint")), folder / "bundle", options)
    return model, folder / "bundle"


def test_every_vision_language_family_is_tested():
    assert sorted({_MODEL_TYPES.get(name, name) for name in CONFIGS}) == vlm.supported()


@pytest.fixture(scope="module", params=["portable", "engine", "cuda"])
def session(request, exported) -> DecoderNetwork:
    bundle: Path = exported[1]
    if request.param == "portable":
        return open_portable(bundle, CAPACITY)
    engine = bundle.parent / request.param
    if request.param == "cuda":
        spec = load_bundle(bundle, LLM_BUNDLE).decoder
        if spec.recurrent is not None or not spec.has_uniform_layers:
            pytest.skip("recurrent layers and those of several sizes run on the CPU")
        cuda_on_cpu.build_base(
            bundle, engine, Plan(max_input_len=48, kv_capacity=CAPACITY, threads=1, prefill="auto")
        )
        return cuda_on_cpu.open_base(engine)
    build_engine(
        "llm",
        bundle,
        engine,
        Plan(max_input_len=48, kv_capacity=CAPACITY, threads=1, prefill="auto"),
        "onnxruntime",
        lambda _: None,
    )
    manifest = load_engine(engine, LLM_ENGINE)
    return open_decoder(engine, manifest)


def _expected(model: Any, prompt: Prompt, axes: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits [S, V] and the hidden states of taps 1, 2 and 4, [S, 3H]."""
    ids = torch.from_numpy(prompt.ids)
    is_image = ids >= VOCABULARY
    model_type = model.config.model_type
    tower = model.model.text_model if hasattr(model.model, "text_model") else None
    tower = model.model.language_model if tower is None else tower
    with torch.no_grad():
        embeds = tower.get_input_embeddings()(torch.where(is_image, 0, ids))
        embeds[is_image] = torch.from_numpy(prompt.embeds)
        extra = {}
        if len(prompt.deepstack):
            extra = {
                "visual_pos_masks": is_image[None],
                "deepstack_visual_embeds": list(torch.from_numpy(prompt.deepstack)),
            }
        if model_type == "gemma3":
            extra = {"token_type_ids": is_image.long()[None]}
        if model_type == "gemma4_unified":  # those of generation with a static cache are Google's
            extra["attention_mask"] = model.create_masks_for_generate(
                model.config,
                embeds[None],
                None,
                None,
                torch.arange(len(ids))[None],
                mm_token_type_ids=is_image.long()[None],
            )
        if model_type == "gemma4":
            extra = {"mm_token_type_ids": is_image.long()[None]}
            if tower.hidden_size_per_layer_input:  # images have those of the padding token
                text = torch.where(is_image, model.config.text_config.pad_token_id, ids)
                extra["per_layer_inputs"] = tower.get_per_layer_inputs(text[None])
        positions = torch.from_numpy(prompt.positions)[:, None] if axes == 3 else None
        states: list[torch.Tensor] = []
        hooks = [
            tower.layers[index].register_forward_pre_hook(
                lambda _, args, kwargs: states.append((args or kwargs["hidden_states"])[0]),
                with_kwargs=True,
            )
            for index in (1, 2)
        ]
        whole = model.model if model_type.startswith("gemma") else tower
        final = whole(inputs_embeds=embeds[None], position_ids=positions, **extra)[0]
        for hook in hooks:
            hook.remove()
        taps = torch.cat([state.reshape(-1, HIDDEN) for state in (*states, final)], -1)
        if model_type == "muse_glimmer":  # scales and caps them after its head
            return model(inputs_embeds=embeds[None]).logits[0].numpy(), taps.numpy()
        return model.lm_head(final)[0].numpy(), taps.numpy()


def _spec(exported: tuple[Any, Path]):
    return load_bundle(exported[1], LLM_BUNDLE).decoder


@pytest.mark.each_change(
    "*qwen2_5_vl*",
    "gemma3-*-pieces",
    "qwen3_5-*-pieces",
    "gemma4-*-pieces",
    "qwen3_vl-engine-pieces",
    "smolvlm-engine-pieces",
    "internvl-engine-pieces",
    "lfm2_vl-engine-pieces",
    "mistral3-engine-pieces",
    "minicpmv4_6-engine-pieces",
    "muse_glimmer-engine-pieces",
)
@pytest.mark.parametrize(
    "chunks", [[40], [30, *[1] * 10], [10, 1, 14, 15]], ids=["prefill", "decode", "pieces"]
)
def test_logits_and_taps_equal_transformers(exported, session, chunks):
    """Chunks may end inside images, unless the tokens of an image attend to each other."""
    spec = _spec(exported)
    assert spec.images is not None
    if spec.images.bidirectional_tokens and len(chunks) == 4:
        chunks = [7, 12, 6, 15]
    prompt = Prompt.make(spec.images.num_deepstack)
    three = spec.position_axes == 3
    positions = prompt.positions[:, :35] if three else None
    session.kv.images = ImageRows(
        embeds=prompt.embeds, deepstack=prompt.deepstack, positions=positions, keys={}
    )
    logits, taps, begin = [], [], 0
    for size in chunks:
        rows = slice(begin, begin + size)
        result = session.run(prompt.ids[rows], begin, np.arange(size))
        logits.append(result.logits.copy())
        taps.append(result.taps.copy())
        begin += size
    expected, expected_taps = _expected(exported[0], prompt, spec.position_axes)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(np.concatenate(logits), expected, atol=TOLERANCE)
    np.testing.assert_allclose(np.concatenate(taps), expected_taps, atol=5e-4)


@pytest.mark.parametrize("exported", ["gemma3"], indirect=True)
def test_causal_kernels_are_refused_if_images_are_not_causal(exported):
    bundle: Path = exported[1]
    plan = Plan(max_input_len=48, kv_capacity=CAPACITY, options=CpuOptions("onnxruntime"))
    with pytest.raises(UnsupportedModelError, match="tokens of an image attend to each other"):
        build_engine("llm", bundle, bundle.parent / "refused", plan, "onnxruntime", lambda _: None)


def test_other_images_give_other_outputs(exported, session):
    """Rows that are shown later count, also for passes that ran before."""
    spec = _spec(exported)
    assert spec.images is not None
    prompt = Prompt.make(spec.images.num_deepstack)
    found = []
    for factor in (1, 2):
        session.kv.images = ImageRows(
            embeds=factor * prompt.embeds, deepstack=prompt.deepstack, keys={}
        )
        found.append(session.run(prompt.ids, 0, np.array([39])).logits.copy())
    assert np.abs(found[0] - found[1]).max() > 0.1


def test_gemma_4_without_an_encoder(tmp_path):
    """Its config has an encoder of null."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = {**models.find("gemma4_text").TINY, "pad_token_id": 3}
    config = AutoConfig.for_model("gemma4", text_config=text, vision_config=None)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "checkpoint")
    write_tokenizer(tmp_path / "checkpoint", VOCABULARY)
    checkpoint = open_checkpoint(str(tmp_path / "checkpoint"))
    manifest = export_llm(checkpoint, tmp_path / "bundle", ExportOptions(dtype="fp32"))
    assert manifest.decoder.images is None
    verdict = verify_bundle(checkpoint, tmp_path / "bundle", manifest)
    difference, agreement = re.findall(r"difference (\S+), top-1 agreement (\S+)%", verdict)[0]
    assert (float(difference) < TOLERANCE, agreement) == (True, "100.0")


def test_the_manifest_has_image_tokens_and_position_axes(exported):
    spec = _spec(exported)
    has_axes = spec.images.model_type.startswith(("qwen", "cosmos3", "minicpmv4_7"))
    assert spec.position_axes == (3 if has_axes else 1)
    assert spec.images.token_id == IMAGE_TOKEN
    levels = {"qwen3_vl": 2, "qwen3_vl_moe": 1}
    assert spec.images.num_deepstack == levels.get(spec.images.model_type, 0)
    is_stated = getattr(exported[0].config.get_text_config(), "use_bidirectional_attention", None)
    tokens = 280 if is_stated == "vision" else 16 if spec.images.model_type == "gemma3" else 0
    assert spec.images.bidirectional_tokens == tokens


@pytest.mark.parametrize("family", ["qwen3_5", "minicpmv4_7"])
def test_axes_that_a_config_omits_are_those_of_transformers(family):
    from transformers.models.qwen3_5 import configuration_qwen3_5, modeling_qwen3_5

    theirs = configuration_qwen3_5.Qwen3_5TextConfig(head_dim=256)
    rope = {key: value for key, value in theirs.rope_parameters.items() if "mrope" not in key}
    theirs.rope_parameters = rope
    config = {
        "model_type": family,
        "text_config": {"model_type": "qwen3_5_text", "rope_parameters": rope},
        "vision_config": {},
        "image_token_id": 1,
    }
    stored: Any = SimpleNamespace(infos=dict)
    checkpoint = Checkpoint(
        label="a", config=config, generation_config={}, tensors=stored, tokenizer_files={}
    )
    found = vlm.text_tower(checkpoint).checkpoint.config["rope_parameters"]
    expected = modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(theirs).mrope_section
    assert found["mrope_section"] == expected


@pytest.mark.parametrize(
    "family", ["gemma3", "mistral3", "muse_glimmer", "qwen2_5_vl", "qwen3_vl", "smolvlm"]
)
def test_verify_compares_texts_with_the_whole_model(family, tmp_path):
    """--verify uses text only, with transformers' whole model as the reference."""
    _save(family, tmp_path / "checkpoint")
    checkpoint = open_checkpoint(str(tmp_path / "checkpoint"))
    options = ExportOptions(dtype="fp32", num_layers=3, hidden_taps=(1, 2))
    manifest = export_llm(checkpoint, tmp_path / "bundle", options)
    verdict = verify_bundle(checkpoint, tmp_path / "bundle", manifest)
    found = re.findall(r"difference (\d\.\d\de-\d\d)", verdict)
    assert len(found) == 2
    assert all(float(difference) < TOLERANCE for difference in found)


# Per family: prefixes as transformers writes them, for other tools' sake, and as it names modules.
_OTHER_NAMES = {
    "gemma3": {
        "language_model.model.": "model.language_model.",
        "vision_tower.": "model.vision_tower.",
        "language_model.lm_head.": "lm_head.",
    },
    "qwen2_5_vl": {"model.": "model.language_model.", "visual.": "model.visual."},
    "mistral3": {
        "language_model.model.": "model.language_model.",
        "vision_tower.": "model.vision_tower.",
        "language_model.lm_head.": "lm_head.",
    },
    "internvl": {
        "language_model.model.": "model.language_model.",
        "vision_tower.": "model.vision_tower.",
        "language_model.lm_head.": "lm_head.",
    },
}


@pytest.mark.parametrize("family", sorted(_OTHER_NAMES))
def test_older_tensor_names_and_configs_give_the_same_bundle(family, tmp_path):
    """Other prefixes, Qwen's flat config with its older rope: the same bundle."""
    from safetensors.torch import load_file, save_file

    _save(family, tmp_path / "new")
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    tensors, renamed = {}, set()
    for name, tensor in load_file(tmp_path / "new" / "model.safetensors").items():
        begin = next((begin for begin in _OTHER_NAMES[family] if name.startswith(begin)), "")
        tensors[_OTHER_NAMES[family].get(begin, "") + name.removeprefix(begin)] = tensor
        renamed.add(begin)
    assert renamed >= set(_OTHER_NAMES[family]) - {"language_model.lm_head."}
    save_file(tensors, tmp_path / "old" / "model.safetensors", metadata={"format": "pt"})
    if family == "qwen2_5_vl":
        path = tmp_path / "old" / "config.json"
        config = json.loads(path.read_text())
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        old = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        flat = {**text, **config, "rope_theta": rope["rope_theta"], "rope_scaling": old}
        path.write_text(json.dumps(flat))
    for age in ("new", "old"):
        checkpoint = open_checkpoint(str(tmp_path / age))
        export_llm(checkpoint, tmp_path / f"{age}-bundle", ExportOptions(dtype="fp32"))
    files = [
        (tmp_path / f"{age}-bundle" / name).read_bytes()
        for name in ("model.onnx", "model.weights")
        for age in ("new", "old")
    ]
    assert files[0] == files[1]
    assert files[2] == files[3]
