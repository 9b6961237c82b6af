"""Tiny random vision-language models with their engines, and transformers' outputs."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import gemma4_assistants
import numpy as np
from eagle_engines import EAGLE3
from eagle_reference import BASE_HIDDEN, BASE_LAYERS, Layout, make_draft
from image_checkpoints import (
    GEMMA,
    GEMMA4,
    IDEFICS,
    INTERNVL,
    LFM,
    MINICPM,
    MUSE,
    NAMED_TOKENS,
    PIXTRAL,
    QWEN,
    channels_last,
    frames_first,
    patches_of,
    places_of,
    planes_of,
    strip_of,
)
from medusa_heads import make_heads
from mtp_reference import add_layer
from visual_checkpoints import make_visual_checkpoint

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan, image_plan
from edgellm.export import visual
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft
from edgellm.export.pipeline.visual import VisualOptions, export_visual

WORDS = ["<unk>", "<s>", "</s>", ":", ".", "user", "assistant"]
SPECIAL = [*QWEN, *INTERNVL.values(), *IDEFICS, *GEMMA.values(), *PIXTRAL, *LFM]
SPECIAL += GEMMA4.values()
LAST = [token for token in (*MINICPM.values(), *MUSE) if token not in SPECIAL]  # of the vocabulary
VOCABULARY = 96
FAMILIES = visual.supported()
QWEN_LIKE = ("qwen", "lfm3", "cosmos3")  # placeholders and grids as Qwen's
# Those of idefics3 and qwen3_vl
SHARED_ENCODERS = ("smolvlm", "qwen3_5", "qwen3_5_moe", "qwen3_vl_moe")
# Recurrent layers, experts, or layers of several sizes
_CPU_ONLY = "qwen3_5", "lfm2", "lfm3", "qwen3_vl_moe", "gemma4", "minicpm"
GPU_FAMILIES = [name for name in FAMILIES if not name.startswith(_CPU_ONLY)]
# Forms of a family besides its TINY, and their text configs
FORMS = {
    "gemma4_31b": (
        "gemma4",
        {
            "use_bidirectional_attention": "vision",
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "use_double_wide_mlp": False,
            "final_logit_softcapping": 20.0,
        },
    )
}
_PLACEHOLDER = {
    "qwen": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": GEMMA["boi_token"],
    "gemma4": GEMMA4["image_token"],
    "gemma4_unified": GEMMA4["image_token"],
    "internvl": "<IMG_CONTEXT>",
    "lfm2_vl": "<image>",
    "minicpmv4_6": MINICPM["image_token"],
    "minicpmv4_7": MINICPM["image_token"],
    "mistral3": PIXTRAL[0],
    "muse_glimmer": MUSE[0],
    "idefics3": "<image>",
    "smolvlm": "<image>",
}
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} : "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}PLACEHOLDER"
    "{% elif item['type'] == 'video' %}FILM"
    "{% else %} {{ item['text'] }} {% endif %}{% endfor %}{% endif %} . {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


# The layout of public drafts of Qwen2.5-VL: M-RoPE in the draft's config, too.
MROPE = replace(
    EAGLE3,
    config={
        **EAGLE3.config,
        "target_model_type": "qwen2_5_vl",
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]},
    },
)
# Base of a draft of `eagle_reference`.
UNDER_DRAFT = {
    "hidden_size": BASE_HIDDEN,
    "num_hidden_layers": BASE_LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def image_token(model_type: str) -> str:
    """Token of one image embedding."""
    if model_type == "gemma3":
        return GEMMA["image_token"]
    return _placeholder(model_type).replace(QWEN[0], "").replace(QWEN[1], "")


def _placeholder(model_type: str) -> str:
    return _PLACEHOLDER["qwen" if model_type.startswith(QWEN_LIKE) else model_type]


def _words() -> list[str]:
    """The vocabulary."""
    first = [*WORDS, *SPECIAL]
    words = [f"w{index}" for index in range(VOCABULARY - len(first) - len(LAST))]
    return [*first, *words, *LAST]


def write_tokenizer(folder: Path, model_type: str) -> None:
    """Words w0, w1, ... and all special tokens; a template with a placeholder for images."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = _words()
    tokenizer = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>", *SPECIAL, *LAST])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    film = f"{QWEN[0]}{QWEN[3]}{QWEN[1]}"
    others = {"gemm": "<|video|>", "mini": MINICPM["video_token"], "muse": MUSE[1]}
    film = others.get(model_type[:4], film)
    template = _TEMPLATE.replace("PLACEHOLDER", _placeholder(model_type))
    config["chat_template"] = template.replace("FILM", film)
    if named := NAMED_TOKENS.get(model_type):
        config["extra_special_tokens"] = named
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_vlm(folder: Path, form: str, **text: Any) -> Path:
    """A whole checkpoint of a family or a form of it; `text` changes its text_config."""
    model_type, own = FORMS.get(form, (form, {}))
    tiny = json.loads(json.dumps(visual.find(model_type).TINY))
    size_key = {"qwen2_vl": "hidden_size"}.get(model_type, "out_hidden_size")
    if "hidden_size" in text and size_key in tiny["vision_config"] and "qwen" in model_type:
        tiny["vision_config"][size_key] = text["hidden_size"]
    heads = {"num_hidden_layers": 3, "vocab_size": VOCABULARY, "pad_token_id": 0}
    tiny["text_config"] |= {**heads, "bos_token_id": 1, "eos_token_id": 2, **own, **text}
    words = _words()
    key = "image_token_index" if "image_token_index" in tiny else "image_token_id"
    tiny[key] = words.index(image_token(model_type))
    if kinds := tiny["text_config"].get("layer_types"):
        count = tiny["text_config"]["num_hidden_layers"]
        tiny["text_config"]["layer_types"] = [kinds[at % len(kinds)] for at in range(count)]
    for key, token in (
        ("vision_start_token_id", QWEN[0]),
        ("vision_end_token_id", QWEN[1]),
        ("video_token_id", MUSE[1] if model_type == "muse_glimmer" else QWEN[3]),
        ("image_start_id", MINICPM["image_start_token"]),
        ("image_end_id", MINICPM["image_end_token"]),
        ("slice_start_id", MINICPM["slice_start_token"]),
        ("slice_end_id", MINICPM["slice_end_token"]),
        ("newline_id", "w8"),
    ):
        if key in tiny:
            tiny[key] = words.index(token)
    make_visual_checkpoint(folder, tiny)
    write_tokenizer(folder, model_type)
    return folder


@dataclass(frozen=True)
class Engines:
    """One checkpoint with its bundles and engines."""

    model_type: str
    checkpoint: Path
    engine: Path
    visual_engine: Path


def build_vlm(
    folder: Path,
    model_type: str,
    draft: Layout | Literal["medusa", "mtp", "assistant"] | None = None,
    dtype: str = "fp32",
    **limits: int,
) -> Engines:
    """Checkpoint, bundles and engines for the CPU; under a draft a base of eight layers.

    Under an assistant of Gemma 4 it is the base of `gemma4_assistants`.
    """
    base = UNDER_DRAFT if draft is not None else {}
    if draft == "assistant":
        base = gemma4_assistants.FORMS[model_type][1] | {"max_position_embeddings": 1024}
    checkpoint = make_vlm(folder / "checkpoint", model_type, **base)
    source, options = open_checkpoint(str(checkpoint)), ExportOptions(dtype=dtype)
    found = Engines(model_type, checkpoint, folder / "engine", folder / "visual_engine")
    plan = Plan(max_input_len=512, kv_capacity=576, threads=1, prefill="same", quantize="none")
    if draft is not None:
        own = checkpoint if draft == "mtp" else folder / "draft"
        if draft == "mtp":
            add_layer(checkpoint)
            source = open_checkpoint(str(checkpoint))
        elif draft == "medusa":
            make_heads(own)
        elif draft == "assistant":
            gemma4_assistants.make_assistant(own, model_type)
        else:
            make_draft(own, draft)
        network = open_draft(str(own))
        export_draft(network, source, folder / "draft_bundle", DraftOptions(dtype))
        plan = replace(plan, max_verify_tree_size=40, max_draft_tree_size=40)
        build_engine("draft", folder / "draft_bundle", found.engine, plan, "onnxruntime", _silent)
        options = replace(options, draft_model_dir=str(own))
    export_llm(source, folder / "bundle", options)
    export_visual(source, folder / "visual_bundle", VisualOptions("fp32"))
    build_engine("llm", folder / "bundle", found.engine, plan, "onnxruntime", _silent)
    sizes = {"min_image_tokens": 1, "max_image_tokens": 400, "max_image_tokens_per_image": 200}
    encoder = image_plan(**{**sizes, **limits}, threads=1)
    build_engine(
        "visual", folder / "visual_bundle", found.visual_engine, encoder, "onnxruntime", _silent
    )
    return found


def by_whole_passes(
    model: Any, ids: Any, kinds: Any, rows: dict[int, Any], count: int
) -> list[int]:
    """Greedy ids without a cache, at most `count`; the other arguments are of `whole_pass`."""
    import torch

    begin = ids.shape[1]
    while ids.shape[1] < begin + count and (ids.shape[1] == begin or ids[0, -1] != 2):
        kinds = torch.nn.functional.pad(kinds, (0, ids.shape[1] - kinds.shape[1]))
        logits = whole_pass(model, ids, kinds, rows)
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, begin:].tolist()


def whole_pass(model: Any, ids: Any, kinds: Any, rows: dict[int, Any]) -> Any:
    """Logits [1, S, V] with the masks of Google's implementation.

    Those that transformers makes of 2-D masks have global layers that are not causal:
    github.com/huggingface/transformers/issues/46711

    Args:
        model: Gemma 4 12B.
        ids: [1, S].
        kinds: of the tokens, [1, S].
        rows: embeddings of tokens, by kind.
    """
    import torch

    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
        for kind, found in rows.items():
            embeds[kinds == kind] = found
        positions = torch.arange(ids.shape[1])[None]
        masks = model.create_masks_for_generate(
            model.config, embeds, None, None, positions, mm_token_type_ids=kinds
        )
        return model(inputs_embeds=embeds, position_ids=positions, attention_mask=masks).logits


class Reference:
    """The checkpoint in transformers."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        from transformers import AutoModelForImageTextToText

        self.model = AutoModelForImageTextToText.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def answer(
        self,
        ids: list[int],
        pixels: list[np.ndarray],
        grids: list[tuple[int, int]],
        count: int,
        **film: Any,
    ) -> list[int]:
        """Greedy ids that follow a prompt whose images stand as image tokens, films as video's.

        `film`: what transformers' processor makes of one, as tensors.
        """
        import torch

        config = self.model.config
        tokens = torch.tensor([ids])
        inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        inputs |= film
        if pixels and config.model_type == "lfm2_vl":
            inputs |= self._patches(pixels, grids)
        elif pixels and config.model_type.startswith("minicpm"):
            inputs |= self._strips(pixels, grids)
        elif pixels and config.model_type.startswith("gemma4"):
            inputs |= self._placed_patches(pixels, grids)
        elif pixels and config.model_type == "muse_glimmer":
            merge = config.vision_config.merge_size
            rows = [frames_first(*each, merge) for each in zip(pixels, grids, strict=True)]
            inputs["pixel_values"] = torch.from_numpy(np.concatenate(rows))
        elif pixels and config.model_type == "mistral3":
            inputs |= self._planes(pixels, grids)
        elif pixels:
            whole = np.concatenate(pixels)
            if config.model_type == "cosmos3_edge":
                whole = channels_last(whole, config.vision_config.patch_size)
            together = torch.from_numpy(whole)
            is_tiles = config.model_type in ("idefics3", "smolvlm")
            inputs["pixel_values"] = together[None] if is_tiles else together
        if config.model_type == "gemma3":
            inputs["token_type_ids"] = (tokens == config.image_token_id).long()
        if config.model_type.startswith(("qwen", "cosmos3", "gemma4", "minicpmv4_7")):
            kinds = (tokens == config.image_token_id).long()
            kinds += 2 * (tokens == config.video_token_id).long()
            inputs["mm_token_type_ids"] = kinds
        if pixels and config.model_type.startswith((*QWEN_LIKE, "muse")):
            inputs["image_grid_thw"] = torch.tensor([(1, *grid) for grid in grids])
        if config.model_type == "gemma4_unified":
            rows = self._placed_rows(inputs)
            return by_whole_passes(self.model, tokens, inputs["mm_token_type_ids"], rows, count)
        with torch.no_grad():
            output = self.model.generate(
                **inputs, max_new_tokens=count, do_sample=False, eos_token_id=2
            )
        return output[0, len(ids) :].tolist()

    def _placed_rows(self, inputs: dict[str, Any]) -> dict[int, Any]:
        """Embeddings of images and videos, by the kind of their tokens."""
        import torch

        with torch.no_grad():
            features: dict[int, Any] = {}
            if "pixel_values" in inputs:
                places = inputs["image_position_ids"]
                found = self.model.get_image_features(inputs["pixel_values"], places)
                features[1] = torch.cat([*found.pooler_output])
            if "pixel_values_videos" in inputs:
                names = "pixel_values_videos", "video_position_ids", "num_frames_per_video"
                found = self.model.model.get_video_features(*(inputs[name] for name in names))
                features[2] = torch.cat([*found.pooler_output])
        return features

    def _planes(self, pixels: list[np.ndarray], grids: list[Any]) -> dict[str, Any]:
        """Inputs of Pixtral: images, padded to the same size."""
        import torch

        merge = self.model.config.spatial_merge_size
        planes = [planes_of(*each, merge) for each in zip(pixels, grids, strict=True)]
        sizes = [each.shape[1:] for each in planes]
        high, wide = (max(each) for each in zip(*sizes, strict=True))
        padded = np.zeros((len(planes), 3, high, wide), np.float32)
        for place, each in zip(padded, planes, strict=True):
            place[:, : each.shape[1], : each.shape[2]] = each
        return {"pixel_values": torch.from_numpy(padded), "image_sizes": torch.tensor(sizes)}

    def _patches(self, pixels: list[np.ndarray], grids: list[Any]) -> dict[str, Any]:
        """Inputs of SigLIP 2: patches of all passes, padded to the same number."""
        import torch

        config, sizes = self.model.config, [size for passes in grids for size in passes]
        parts = np.split(np.concatenate(pixels), np.cumsum([r * c for r, c in sizes])[:-1])
        longest = max(map(len, parts))
        padded = np.zeros((len(parts), longest, parts[0].shape[1]), np.float32)
        mask = np.zeros((len(parts), longest), np.int64)
        for at, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            planes = planes_of(part, size, config.downsample_factor)
            padded[at, : len(part)] = patches_of(planes, config.vision_config.patch_size)
            mask[at, : len(part)] = 1
        return {
            "pixel_values": torch.from_numpy(padded),
            "pixel_attention_mask": torch.from_numpy(mask),
            "spatial_shapes": torch.tensor(sizes),
        }

    def _strips(self, pixels: list[np.ndarray], grids: list[Any]) -> dict[str, Any]:
        """Inputs of MiniCPM-V's encoder: patches of all passes, one right of the other."""
        import torch

        sizes = [size for passes in grids for size in passes]
        parts = np.split(np.concatenate(pixels), np.cumsum([r * c for r, c in sizes])[:-1])
        side = self.model.config.vision_config.patch_size
        planes = [planes_of(*each, 4) for each in zip(parts, sizes, strict=True)]
        strip = np.concatenate([strip_of(each, side) for each in planes], axis=-1)
        return {
            "pixel_values": torch.from_numpy(strip[None]),
            "target_sizes": torch.tensor(sizes),
        }

    def _placed_patches(self, pixels: list[np.ndarray], grids: list[Any]) -> dict[str, Any]:
        """Inputs of Gemma 4's encoder: patches with their places, padded to the same number."""
        import torch

        vision, longest = self.model.config.vision_config, max(map(len, pixels))
        patches = np.zeros((len(pixels), longest, pixels[0].shape[1]), np.float32)
        places = np.full((len(pixels), longest, 2), -1)
        for at, (part, grid) in enumerate(zip(pixels, grids, strict=True)):
            merged, side = vision.pooling_kernel_size, vision.patch_size
            if self.model.config.model_type == "gemma4_unified":
                merged, side = 1, merged * side
            patches[at, : len(part)] = patches_of(planes_of(part, grid, merged), side)
            places[at, : len(part)] = places_of(grid)
        return {
            "pixel_values": torch.from_numpy(patches),
            "image_position_ids": torch.from_numpy(places),
        }


def _silent(_: str) -> None:
    pass
