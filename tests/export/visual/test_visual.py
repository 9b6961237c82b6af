"""All visual encoders at tiny random size: graphs on ONNX Runtime against transformers."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import assert_one_line_error, make_checkpoint
from visual_checkpoints import (
    VisualModel,
    make_visual_checkpoint,
    random_pixels,
    rename_tensors,
    whole_grid,
)

from edgellm.core.artifact import verify_files
from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.core.manifest import VISUAL_BUNDLE, Bundle, load_bundle
from edgellm.export import models, visual
from edgellm.export.config.reader import ConfigReader
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.visual import VisualOptions, export_visual

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 2e-4
# Smaller than a window of 6 by 6, one window, not multiples of it, one block wide. Of tile
# encoders the first number counts tiles.
GRIDS = [(2, 2), (6, 6), (4, 10), (14, 8), (2, 18), (10, 2), (12, 12)]


def _tiny(model_type: str, vision: dict | None = None, **changes: object) -> dict:
    tiny = visual.find(model_type).TINY
    return {**tiny, "vision_config": {**tiny["vision_config"], **(vision or {})}, **changes}


VARIANTS = {
    **{name: _tiny(name) for name in visual.supported()},
    "qwen2_vl_gelu_wide_head": _tiny("qwen2_vl", {"hidden_act": "gelu", "num_heads": 1}),
    "qwen2_5_vl_merge_1": _tiny(
        "qwen2_5_vl", {"spatial_merge_size": 1, "window_size": 20, "fullatt_block_indexes": [2]}
    ),
    "qwen3_vl_without_deepstack": _tiny("qwen3_vl", {"deepstack_visual_indexes": []}),
    "internvl_6b": _tiny(
        "internvl",
        {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False,
         "use_mean_pooling": False, "use_absolute_position_embeddings": False},
    ),
    "lfm2_vl_plain": _tiny(
        "lfm2_vl", {"num_patches": 256}, projector_use_layernorm=False, projector_bias=False
    ),
    "minicpmv4_6_early": _tiny(
        "minicpmv4_6", {"hidden_act": "gelu", "image_size": 50, "patch_size": 8}, insert_layer_id=0
    ),
    "mistral3_merge_1": _tiny(
        "mistral3",
        {"num_hidden_layers": 3, "hidden_act": "gelu", "rope_parameters": {"rope_theta": 100.0}},
        spatial_merge_size=1, multimodal_projector_bias=True, projector_hidden_act="silu",
    ),
    "muse_glimmer_rest": _tiny(
        "muse_glimmer",
        {"hidden_act": "gelu_pytorch_tanh", "layer_types": None, "num_hidden_layers": 2,
         "merge_size": 1, "rope_parameters": {"rope_theta": 100.0}},
        projector_hidden_act="silu", out_hidden_size=32,
    ),
    "gemma3_rest": _tiny(
        "gemma3", {"image_size": 50, "patch_size": 8, "hidden_act": "gelu"}, mm_tokens_per_image=9
    ),
    "gemma4_31b": _tiny(
        "gemma4",
        {"use_clipped_linears": False, "standardize": True, "pooling_kernel_size": 3,
         "head_dim": 24, "hidden_activation": "gelu", "rope_parameters": {"rope_theta": 40.0}},
    ),
    "smolvlm_no_rest": _tiny("smolvlm", {"image_size": 32, "patch_size": 8}, scale_factor=2),
}  # fmt: skip


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def model(request, tmp_path_factory) -> VisualModel:
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = make_visual_checkpoint(folder / "checkpoint", VARIANTS[request.param])
    return VisualModel(checkpoint, folder / "bundle")


@pytest.mark.each_change("*")
def test_features_equal_transformers(model):
    grids = [whole_grid(model.spec, grid) for grid in GRIDS]
    grids += [(5, 7), (11, 3)] if model.spec.merge_size == 1 else []
    pixels = [random_pixels(model.spec, grid, seed) for seed, grid in enumerate(grids)]
    expected = model.features(pixels, grids)
    for image, grid, wanted in zip(pixels, grids, expected, strict=True):
        found = model.run(image, grid)
        assert [output.shape for output in found] == [output.shape for output in wanted]
        for output, reference in zip(found, wanted, strict=True):
            assert np.abs(reference).max() > 1  # the comparison means something
            np.testing.assert_allclose(output, reference, atol=TOLERANCE)


def test_the_manifest_has_the_output_shapes(model):
    spec, grid = model.spec, whole_grid(model.spec, (4, 10))
    pixels = random_pixels(spec, grid, 0)
    embeds, *levels = model.run(pixels, grid)
    tokens = len(pixels) * spec.tokens_per_tile or math.prod(grid) // spec.merge_size**2
    assert embeds.shape == (tokens, spec.hidden_size)
    assert [level.shape for level in levels] == (
        [(spec.num_deepstack, tokens, spec.hidden_size)] if spec.num_deepstack else []
    )
    parts = visual.find(spec.model_type).Model.parts
    model_parts = dict(model.reference.model.named_parameters())
    buffers = model.reference.model.named_buffers()
    model_parts |= {name: value for name, value in buffers if name.endswith(".std_bias")}
    ours = [value for name, value in model_parts.items() if name.startswith(parts)]
    assert spec.num_parameters == sum(value.numel() for value in ours)


def test_no_value_of_a_graph_grows_with_the_square_of_the_patches(model):
    """Scores inside Attention operators do not count."""
    import onnx

    graph = onnx.load(model.bundle / "model.onnx", load_external_data=False)
    inferred = onnx.shape_inference.infer_shapes(graph)
    for value in inferred.graph.value_info:
        dims = [dim.dim_param for dim in value.type.tensor_type.shape.dim]
        assert dims.count("patches") <= 1
    masks = {
        node.input[3]
        for node in graph.graph.node
        if node.op_type == "Attention" and len(node.input) > 3
    }
    assert len(masks) == (1 if model.spec.window_size else 0)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm", "gemma4"])
@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_float16_graphs_are_close_to_float32(tmp_path, model_type, stored):
    checkpoint = make_visual_checkpoint(tmp_path / "c", _tiny(model_type), dtype=stored)
    model = VisualModel(checkpoint, tmp_path / "bundle", "fp16")
    assert (model.manifest.dtype, model.manifest.quantization) == ("float16", "none")
    pixels = random_pixels(model.spec, (4, 10), 0)
    for found, wanted in zip(
        model.run(pixels, (4, 10)), model.features([pixels], [(4, 10)])[0], strict=True
    ):
        assert found.dtype == np.float16
        np.testing.assert_allclose(found, wanted, atol=0.01 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("model_type", "old", "new"),
    [
        ("qwen2_vl", "visual.", "model.visual."),
        ("qwen3_vl", "model.visual.", "visual."),
        ("gemma3", "vision_tower.", "model.vision_tower.vision_model."),
        ("internvl", "vision_tower.", "model.vision_tower."),
        ("mistral3", "vision_tower.", "model.vision_tower."),
        ("lfm2_vl", "model.vision_tower.", "vision_tower.vision_model."),
        ("minicpmv4_6", "model.vision_tower.", "vision_tower."),
        ("smolvlm", "model.vision_model.", "vision_model."),
    ],
)
def test_both_prefixes_of_tensors_give_the_same_bundle(tmp_path, model_type, old, new):
    """Both names: transformers writes one, and files of other versions have the other."""
    checkpoint = make_visual_checkpoint(tmp_path / "c", _tiny(model_type))
    VisualModel(checkpoint, tmp_path / "one")
    rename_tensors(checkpoint, old, new)
    projector = "multi_modal_projector."
    others = {
        "gemma3": projector,
        "lfm2_vl": f"model.{projector}",
        "minicpmv4_6": "model.merger.",
        "internvl": projector,
        "mistral3": projector,
        "smolvlm": "model.connector.",
    }
    other = others.get(model_type)
    if other:
        with pytest.raises(BrokenArtifactError, match="has no tensor"):
            _export(checkpoint, tmp_path / "half")
        added = other.removeprefix("model.") if other.startswith("model.") else f"model.{other}"
        rename_tensors(checkpoint, other, added)
    _export(checkpoint, tmp_path / "two")
    one, two = ((tmp_path / name / "model.weights").read_bytes() for name in ("one", "two"))
    assert one == two


def test_weights_are_the_stored_bytes(tmp_path):
    """Also for the patch embedding, whose kernel is read as a matrix."""
    from safetensors.numpy import load_file

    checkpoint = make_visual_checkpoint(tmp_path / "c", _tiny("qwen3_vl"))
    manifest = _export(checkpoint, tmp_path / "bundle")
    stored = load_file(checkpoint / "model.safetensors")
    kernel = stored["model.visual.patch_embed.proj.weight"]
    assert kernel.ndim == 5
    assert kernel.tobytes() in (tmp_path / "bundle" / "model.weights").read_bytes()
    assert manifest.vision.patch_values == math.prod(kernel.shape[1:])


def test_keys_and_names_of_older_files_give_the_same_bundle(tmp_path):
    """The Hub's Qwen2-VL: language keys at the top level, other keys for channels and patches."""
    checkpoint = make_visual_checkpoint(tmp_path / "c", _tiny("qwen2_vl"))
    config = json.loads((checkpoint / "config.json").read_text())
    config |= config.pop("text_config")
    config["model_type"] = "qwen2_vl"
    vision = config["vision_config"]
    del vision["in_channels"], vision["rope_parameters"]
    vision |= {"in_chans": 3, "spatial_patch_size": 4, "model_type": "qwen2_vl"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    model = VisualModel(checkpoint, tmp_path / "bundle")
    pixels = random_pixels(model.spec, (4, 6), 0)
    expected = model.features([pixels], [(4, 6)])[0]
    np.testing.assert_allclose(model.run(pixels, (4, 6))[0], expected[0], atol=TOLERANCE)


# What files on the Hub say: `vision_config`, the rest that matters, tokens of a tile or of a
# grid of 16 by 24 patches.
_SIGLIP = {"size": {"longest_edge": 2048}, "tie_word_embeddings": False}
_QWEN = {"spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 16}
_HUB = {
    "qwen2_vl": (
        {**_QWEN, "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "in_chans": 3, "patch_size": 14,
         "hidden_size": 1536, "spatial_patch_size": 14, "model_type": "qwen2_vl"},
        {"hidden_size": 1536}, 96,
    ),
    "qwen2_5_vl": (
        {**_QWEN, "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "in_chans": 3,
         "intermediate_size": 3420, "out_hidden_size": 2048, "patch_size": 14,
         "spatial_patch_size": 14, "window_size": 112, "tokens_per_second": 2,
         "fullatt_block_indexes": [7, 15, 23, 31]},
        {"hidden_size": 2048}, 96,
    ),
    "qwen3_vl": (
        {**_QWEN, "deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_size": 1024,
         "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "initializer_range": 0.02,
         "intermediate_size": 4096, "num_position_embeddings": 2304, "out_hidden_size": 2560,
         "patch_size": 16, "model_type": "qwen3_vl"},
        {"text_config": {"hidden_size": 2560}}, 96,
    ),
    "internvl": (
        {"architectures": ["InternVisionModel"], "attention_bias": True, "dropout": 0.1,
         "hidden_dropout_prob": 0.1, "projection_dropout": 0.1, "initializer_factor": 0.1,
         "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
         "num_hidden_layers": 24, "image_size": [448, 448], "patch_size": [14, 14],
         "norm_type": "layer_norm", "layer_scale_init_value": 0.1, "use_mean_pooling": True},
        {"text_config": {"hidden_size": 896}, "downsample_ratio": 0.5}, 256,
    ),
    "lfm2_vl": (
        {"attention_dropout": 0.0, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 768,
         "intermediate_size": 3072, "layer_norm_eps": 1e-06, "model_type": "siglip2_vision_model",
         "num_attention_heads": 12, "num_channels": 3, "num_hidden_layers": 12,
         "num_patches": 256, "patch_size": 16, "vision_use_head": False},
        {"text_config": {"hidden_size": 1024}, "downsample_factor": 2, "projector_bias": True,
         "projector_hidden_size": 2560, "vision_feature_layer": -1}, 96,
    ),
    "lfm3_vl": (
        {"conv_kernel_size": 3, "hidden_size": 1024, "in_channels": 3, "intermediate_size": 2560,
         "layer_types": ["conv", "conv", *["full_attention", "conv"] * 6],
         "model_type": "lfm3_vl_vision", "norm_eps": 1e-05, "num_attention_heads": 16,
         "num_hidden_layers": 14, "num_key_value_heads": 8, "patch_size": 16,
         "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "axial"},
         "spatial_merge_size": 2, "temporal_patch_size": 2},
        {"text_config": {"hidden_size": 2048}, "projector_bias": True,
         "projector_hidden_act": "gelu", "projector_hidden_size": 4096}, 96,
    ),
    "minicpmv4_6": (
        {"attention_dropout": 0.0, "dtype": "bfloat16", "hidden_act": "gelu_pytorch_tanh",
         "hidden_size": 1152, "image_size": 980, "insert_layer_id": 6, "intermediate_size": 4304,
         "layer_norm_eps": 1e-06, "model_type": "minicpmv4_6_vision", "num_attention_heads": 16,
         "num_channels": 3, "num_hidden_layers": 27, "patch_size": 14,
         "window_kernel_size": [2, 2]},
        {"text_config": {"hidden_size": 1024}, "drop_vision_last_layer": False,
         "insert_layer_id": 6, "merge_kernel_size": [2, 2], "merger_times": 1}, 24,
    ),
    "muse_glimmer": (
        {"hidden_act": "gelu", "hidden_size": 1536, "intermediate_size": 8960,
         "layer_norm_eps": 1e-05, "layer_types": [*["window_attention"] * 3, "full_attention"] * 12
         + ["window_attention", "full_attention"], "max_position_embeddings": 1024,
         "merge_size": 2, "model_type": "muse_glimmer_vision", "num_attention_heads": 16,
         "num_hidden_layers": 50, "patch_size": 14, "patch_temporal": 2, "pos_emb_height": 32,
         "pos_emb_width": 32, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"}},
        {"text_config": {"hidden_size": 6656, "rms_norm_eps": 1e-5}, "out_hidden_size": 6144,
         "projector_hidden_act": "gelu", "projector_hidden_size": 4096}, 96,
    ),
    "minicpmv4_7": (
        {"hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152, "image_size": 980,
         "insert_layer_id": 6, "intermediate_size": 4304, "model_type": "minicpmv4_7_vision",
         "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
         "window_kernel_size": [2, 2]},
        {"text_config": {"hidden_size": 1024}, "insert_layer_id": 6, "merger_times": 1}, 24,
    ),
    "mistral3": (
        {"head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1540,
         "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "pixtral",
         "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14,
         "rope_theta": 10000.0},
        {"text_config": {"hidden_size": 3072, "rms_norm_eps": 1e-5}, "spatial_merge_size": 2,
         "vision_feature_layer": -1, "projector_hidden_act": "gelu"}, 96,
    ),
    "gemma3": (
        {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
         "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
         "patch_size": 14, "vision_use_head": False},
        {"text_config": {"hidden_size": 2560}, "mm_tokens_per_image": 256}, 256,
    ),
    "gemma4": (
        {"attention_bias": False, "attention_dropout": 0.0, "default_output_length": 280,
         "global_head_dim": 64, "head_dim": 64, "hidden_activation": "gelu_pytorch_tanh",
         "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072,
         "max_position_embeddings": 131072, "model_type": "gemma4_vision",
         "num_attention_heads": 12, "num_hidden_layers": 16, "num_key_value_heads": 12,
         "patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10240,
         "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
         "standardize": False, "use_clipped_linears": True},
        {"text_config": {"hidden_size": 1536}, "vision_soft_tokens_per_image": 280}, 42,
    ),
    "idefics3": (
        {**_SIGLIP, "hidden_size": 1152, "image_size": 364, "intermediate_size": 4304,
         "max_image_size": {"longest_edge": 364}, "num_attention_heads": 16,
         "num_hidden_layers": 27, "patch_size": 14, "use_base_siglip": False},
        {"text_config": {"hidden_size": 4096}, "scale_factor": 2}, 169,
    ),
    "smolvlm": (
        {**_SIGLIP, "hidden_size": 768, "image_size": 512, "num_attention_heads": 12,
         "max_image_size": {"longest_edge": 512}, "patch_size": 16, "use_base_siglip": True},
        {"text_config": {"hidden_size": 576}, "scale_factor": 4}, 64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("model_type", _HUB)
def test_configs_of_the_hub_are_read(model_type):
    vision_config, rest, tokens = _HUB[model_type]
    vision = ConfigReader(vision_config)
    config = visual.find(model_type).Config.from_hf(vision, ConfigReader(rest))
    vision.finish()
    spec = config.spec(model_type, 0)
    assert (spec.tokens_per_tile or 16 * 24 // spec.merge_size**2) == tokens
    if model_type == "qwen2_5_vl":
        assert (spec.window_size, spec.patch_values) == (8, 1176)


@pytest.mark.parametrize(("tokens", "size"), [(15, 32), (9, 32), (256, 32), (4, 3)])
def test_pooling_of_gemma_needs_whole_blocks(tokens, size):
    vision = ConfigReader({**visual.find("gemma3").TINY["vision_config"], "image_size": size})
    rest = ConfigReader({"mm_tokens_per_image": tokens, "text_config": {"hidden_size": 8}})
    with pytest.raises(UnsupportedModelError, match=f"mm_tokens_per_image = {tokens} is not a"):
        visual.find("gemma3").Config.from_hf(vision, rest)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads = 1 of the encoder should be 2"),
        ({"head_dim": 6}, "head_dim = 6 of the encoder is no multiple of 4"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type = 'yarn'"),
    ],
)
def test_configs_of_gemma_4_that_are_rejected(changes, message):
    vision = ConfigReader({**visual.find("gemma4").TINY["vision_config"], **changes})
    rest = ConfigReader({"text_config": {"hidden_size": 8}})
    with pytest.raises(UnsupportedModelError, match=message):
        visual.find("gemma4").Config.from_hf(vision, rest)


@pytest.mark.parametrize(
    ("vision", "rest", "message"),
    [
        ({"window_kernel_size": [2, 4]}, {}, r"window_kernel_size = \[2, 4\] is not supported"),
        ({"image_size": 3}, {}, "image_size of the encoder is smaller than its patch_size"),
        ({}, {"merger_times": 2}, "merger_times = 2 is not supported"),
        ({}, {"downsample_mode": "2x"}, "downsample_mode = .2x. is not supported"),
        ({}, {"insert_layer_id": 3}, "insert_layer_id = 3 is none of the 3 blocks"),
        ({}, {"insert_layer_id": -1}, "insert_layer_id = -1 is none of the 3 blocks"),
    ],
)
def test_configs_of_minicpm_that_are_rejected(vision, rest, message):
    tiny = _tiny("minicpmv4_6", vision, **rest)
    with pytest.raises(UnsupportedModelError, match=message):
        visual.find("minicpmv4_6").Config.from_hf(
            ConfigReader(tiny["vision_config"]), ConfigReader(tiny)
        )


def test_minicpm_without_its_first_merge(tmp_path):
    checkpoint = make_visual_checkpoint(
        tmp_path / "c", _tiny("minicpmv4_6", downsample_mode="4x", insert_layer_id=9)
    )
    model, grid = VisualModel(checkpoint, tmp_path / "bundle"), (6, 10)
    pixels = random_pixels(model.spec, grid, 0)
    (expected,) = model.features([pixels], [grid])
    assert expected[0].shape == (15, 48)
    np.testing.assert_allclose(model.run(pixels, grid)[0], expected[0], atol=TOLERANCE)


def test_bounds_of_clipped_layers(tmp_path):
    """Infinite ones clip nothing; those of the wrong order are rejected by name."""
    import onnx
    from safetensors.numpy import load_file, save_file

    checkpoint = make_visual_checkpoint(tmp_path / "c", _tiny("gemma4"))
    path, bundle = checkpoint / "model.safetensors", tmp_path / "bundle"
    tensors = load_file(path)
    bounds = [name for name in tensors if name.endswith(("_min", "_max"))]
    assert len(bounds) == 2 * 7 * 4
    endless = {name: np.array(-np.inf if "_min" in name else np.inf, np.float32) for name in bounds}
    save_file({**tensors, **endless}, path, {"format": "pt"})
    model, pixels = VisualModel(checkpoint, bundle), np.ones((16, 48), np.float32)
    graph = onnx.load(bundle / "model.onnx", load_external_data=False).graph
    assert not [node for node in graph.node if node.op_type == "Clip"]
    (expected,) = model.features([pixels], [(4, 4)])
    np.testing.assert_allclose(model.run(pixels, (4, 4))[0], expected[0], atol=TOLERANCE)
    name = next(name for name in bounds if name.endswith("input_max"))
    for wrong in (-9.0, np.nan):
        save_file({**tensors, name: np.array(wrong, np.float32)}, path, {"format": "pt"})
        with pytest.raises(BrokenArtifactError, match=r"proj\.input_min = .* is not below"):
            _export(checkpoint, tmp_path / "other")


_REFUSED = {
    "unknown_key": ({"mystery": 1}, "does not understand: mystery", "--ignore_config_keys"),
    "activation": ({"hidden_act": "relu"}, "hidden_act = 'relu'", ""),
    "heads": ({"num_heads": 3}, "3 heads do not divide", ""),
    "grid": ({"num_position_embeddings": 26}, "not a square", ""),
    "width": ({"out_hidden_size": 40}, "ends in 40 values, the language model takes 48", ""),
    "levels": ({"deepstack_visual_indexes": [0, 4]}, "are not different blocks of 4", ""),
    "patch": ({"patch_size": [4, 5]}, "not the side of a square", ""),
    "rope": ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type = 'yarn'", ""),
    "channels": ({"in_channels": 1}, "in_channels = 1", ""),
    "depth": ({"depth": 3, "deepstack_visual_indexes": [0, 2]}, "blocks.3", "config.json"),
}


@pytest.fixture(scope="module")
def qwen3_checkpoint(tmp_path_factory) -> Path:
    return make_visual_checkpoint(tmp_path_factory.mktemp("qwen3"), _tiny("qwen3_vl"))


@pytest.mark.parametrize("name", _REFUSED)
def test_unknown_config_keys_are_rejected(qwen3_checkpoint, tmp_path, name):
    changes, fragment, hint = _REFUSED[name]
    checkpoint = open_checkpoint(str(qwen3_checkpoint), tokenizer=False)
    checkpoint.config["vision_config"].update(changes)
    with pytest.raises(EdgeLLMError) as caught:
        export_visual(checkpoint, tmp_path / "bundle", VisualOptions())
    assert fragment in str(caught.value)
    assert hint in caught.value.hint
    assert not (tmp_path / "bundle").exists()


def test_a_key_that_does_not_matter_may_be_ignored(qwen3_checkpoint, tmp_path):
    checkpoint = open_checkpoint(str(qwen3_checkpoint), tokenizer=False)
    checkpoint.config["vision_config"]["mystery"] = 1
    options = VisualOptions(ignore_config_keys=("mystery",))
    assert export_visual(checkpoint, tmp_path / "bundle", options).options == {
        "dtype": "fp16",
        "ignore_config_keys": ("mystery",),
        "quantization": "none",
    }


def test_unused_tensors_of_the_encoder_are_rejected(qwen3_checkpoint, tmp_path):
    """With both prefixes; the language model's tensors are ignored."""
    import shutil

    checkpoint = shutil.copytree(qwen3_checkpoint, tmp_path / "c")
    rename_tensors(checkpoint, "model.language_model.norm.weight", "visual.extra.weight")
    with pytest.raises(BrokenArtifactError, match=r"does not use: visual\.extra\.weight"):
        _export(checkpoint, tmp_path / "bundle")
    rename_tensors(checkpoint, "visual.extra.weight", "something.else")
    rename_tensors(checkpoint, "model.visual.", "gone.")
    with pytest.raises(BrokenArtifactError, match="no tensors below visual"):
        _export(checkpoint, tmp_path / "bundle")


def test_text_models_and_unknown_encoders_are_rejected(tiny_checkpoint, qwen3_checkpoint, tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"text-only model \(llama\)") as caught:
        _export(tiny_checkpoint, tmp_path / "bundle")
    assert "edgellm-export llm" in caught.value.hint
    checkpoint = open_checkpoint(str(qwen3_checkpoint), tokenizer=False)
    checkpoint.config["model_type"] = "qwen9_vl"
    with pytest.raises(UnsupportedModelError, match="'qwen9_vl' is not") as caught:
        export_visual(checkpoint, tmp_path / "bundle", VisualOptions())
    assert caught.value.hint.startswith(f"supported: {', '.join(visual.supported())}")


def test_the_processor_goes_with_the_bundle(qwen3_checkpoint, tmp_path):
    import shutil

    checkpoint = shutil.copytree(qwen3_checkpoint, tmp_path / "c")
    image = json.loads((checkpoint / "preprocessor_config.json").read_text())
    whole = checkpoint / "processor_config.json"
    whole.write_text(json.dumps({"image_processor": {**image, "a": 1}}))
    with pytest.raises(UnsupportedModelError, match=r"processor_config.json: image_processor .* a"):
        _export(checkpoint, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
    whole.write_text(json.dumps({"image_processor": image}))
    manifest = _export(checkpoint, tmp_path / "bundle")
    assert set(manifest.files) == {
        "config.json",
        "model.onnx",
        "model.weights",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    }
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (tmp_path / "bundle" / name).read_text() == (checkpoint / name).read_text()
        (checkpoint / name).unlink()
    with pytest.raises(EdgeLLMError, match=r"has no preprocessor_config\.json"):
        _export(checkpoint, tmp_path / "other")


def test_export_visual_writes_a_bundle(command_here, qwen3_checkpoint, tmp_path):
    bundle = tmp_path / "bundle"
    result = command_here(
        "edgellm-export", "visual", "--model_dir", qwen3_checkpoint, "--output_dir", bundle,
        "--dtype", "fp32",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "visual encoder of qwen3_vl, 0.1 M parameters, fp32, quantization none" in result.stdout
    assert re.fullmatch(
        r"verdict: [\d.]+ MB in [\d.]+ s; all tensors of the encoder are used, and all numbers are "
        r"finite; outputs were not compared with transformers",
        result.stdout.splitlines()[-1],
    )
    manifest = load_bundle(bundle, VISUAL_BUNDLE)
    verify_files(bundle, manifest.files)
    assert (manifest.kind, manifest.dtype) == ("visual_bundle", "float32")
    assert manifest.provenance["checkpoint"] == str(qwen3_checkpoint)


def test_command_rejects_text_models_in_one_line(command_here, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "c", **models.find("llama").TINY)
    result = command_here(
        "edgellm-export", "visual", "--model_dir", checkpoint, "--output_dir", tmp_path / "bundle"
    )
    assert_one_line_error(result, "is a text-only model (llama)", "edgellm-export llm")


def _export(checkpoint: Path, bundle: Path) -> Bundle:
    source = open_checkpoint(str(checkpoint), tokenizer=False)
    return export_visual(source, bundle, VisualOptions("fp32"))
