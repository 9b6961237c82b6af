"""Tiny random chat models that take audio, their engines, and transformers' processors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from eagle_reference import Layout, make_draft
from image_checkpoints import write_tiny_processor
from vlm_engines import UNDER_DRAFT, by_whole_passes, whole_pass

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan, audio_plan
from edgellm.export import audio
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.audio import export_audio
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.encoder import EncoderOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft

VOCABULARY = 96
WORDS = ["<unk>", "<s>", "</s>", ":", ".", "user", "assistant", "system"]
QWEN = "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"
VOXTRAL = "[BEGIN_AUDIO]", "[AUDIO]"
GEMMA = "<|audio>", "<|audio|>", "<audio|>"  # the processor adds the first and last
IMAGE = "<|image>", "<|image|>", "<image|>"
SPECIAL = [*QWEN, *VOXTRAL, *GEMMA, *IMAGE]
# A clip in templates, and the token of its rows
PLACEHOLDERS = {
    "qwen3_asr": ("".join(QWEN), QWEN[1]),
    "voxtral": ("".join(VOXTRAL), VOXTRAL[1]),
    "gemma4": (GEMMA[1], GEMMA[1]),
    "gemma4_unified": (GEMMA[1], GEMMA[1]),
}
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} : "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'audio' %}PLACEHOLDER"
    "{% elif item['type'] == 'image' %}<|image|>"
    "{% else %} {{ item['text'] }} {% endif %}{% endfor %}{% endif %} . {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def write_tokenizer(folder: Path, model_type: str) -> None:
    """Words w0, w1, ... and the special tokens; a template with a placeholder for audio."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*WORDS, *SPECIAL]
    words += [f"w{index}" for index in range(VOCABULARY - len(words))]
    tokenizer = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>", *SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "chat_template": _TEMPLATE.replace("PLACEHOLDER", PLACEHOLDERS[model_type][0]),
        "extra_special_tokens": {
            "audio_bos_token": QWEN[0],
            "audio_token": QWEN[1],
            "boi_token": IMAGE[0],
            "image_token": IMAGE[1],
            "eoi_token": IMAGE[2],
            "audio_eos_token": QWEN[2],
        },
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_audio_model(
    folder: Path,
    model_type: str,
    vision: dict[str, Any] | None = None,
    hearing: dict[str, Any] | None = None,
    **text: Any,
) -> Path:
    """A whole checkpoint, every parameter random.

    Args:
        folder: is written.
        model_type: of the whole model.
        vision: its vision_config; None: without.
        hearing: changes of audio_config.
        text: changes of text_config.
    """
    import torch
    from transformers import AutoConfig, AutoModelForMultimodalLM

    torch.manual_seed(3)
    tiny = json.loads(json.dumps(audio.find(model_type).TINY))
    own = {"vocab_size": VOCABULARY, "pad_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    tiny["text_config"] |= {**own, **text}
    tiny["audio_config"] |= hearing or {}
    tiny["audio_token_id"] = [*WORDS, *SPECIAL].index(PLACEHOLDERS[model_type][1])
    if model_type.startswith("gemma4"):
        ends = ("boa_token_id", GEMMA[0]), ("eoa_token_index", GEMMA[2])
        tiny |= {key: [*WORDS, *SPECIAL].index(token) for key, token in ends}
        tiny["image_token_id"] = [*WORDS, *SPECIAL].index(IMAGE[1])
        tiny["video_token_id"] = VOCABULARY - 1
    if vision is not None:
        tiny["vision_config"] = vision
    tiny["eos_token_id"] = tiny["pad_token_id"] = 2
    if "hidden_size" in text and "output_dim" in tiny["audio_config"]:
        tiny["audio_config"]["output_dim"] = text["hidden_size"]
    model = AutoModelForMultimodalLM.from_config(AutoConfig.for_model(**tiny))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
            elif ("norm" in name or "ln_" in name) and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("_min"):  # bounds of clipped layers
                buffer.uniform_(-2.5, -1)
            elif name.endswith("_max"):
                buffer.uniform_(1, 2.5)
    model.save_pretrained(folder)
    extractor(tiny).save_pretrained(folder)
    write_tokenizer(folder, model_type)
    if vision is not None:
        write_tiny_processor(folder, tiny)
        whole = folder / "processor_config.json"
        own = json.loads(extractor(tiny).to_json_string())
        whole.write_text(json.dumps({**json.loads(whole.read_text()), "feature_extractor": own}))
        write_tokenizer(folder, model_type)
    return folder


def extractor(config: Mapping[str, Any]) -> Any:
    """The feature extractor of a model's config.json."""
    import transformers

    model_type, own = config["model_type"], config["audio_config"]
    if model_type == "gemma4_unified":
        return transformers.Gemma4UnifiedAudioFeatureExtractor()
    if model_type == "gemma4":
        bins = own["subsampling_conv_channels"][0]
        return transformers.Gemma4AudioFeatureExtractor(feature_size=bins)
    bins = own["num_mel_bins"]
    if model_type == "voxtral":
        seconds = 2 * own["max_source_positions"] // 100
        return transformers.WhisperFeatureExtractor(feature_size=bins, chunk_length=seconds)
    return transformers.Qwen3ASRFeatureExtractor(feature_size=bins)


@dataclass(frozen=True)
class AudioEngines:
    """One checkpoint with its engines."""

    checkpoint: Path
    engine: Path
    audio_engine: Path


def build_audio_model(folder: Path, model_type: str, draft: Layout | None = None) -> AudioEngines:
    """Checkpoint, bundles and engines for the CPU; under a draft a base of eight layers."""
    base = UNDER_DRAFT if draft is not None else {}
    return build_bundles(make_audio_model(folder / "checkpoint", model_type, **base), folder, draft)


def build_bundles(
    checkpoint: Path, folder: Path, draft: Layout | None = None, **changes: Any
) -> AudioEngines:
    """Bundles and engines of a checkpoint; `changes` of the plan."""
    source = open_checkpoint(str(checkpoint))
    found = AudioEngines(checkpoint, folder / "engine", folder / "audio_engine")
    plan = Plan(
        max_input_len=256, kv_capacity=320, threads=1, quantize="none", max_verify_tree_size=12
    )
    plan, options = replace(plan, **changes), ExportOptions(dtype="fp32")
    if draft is not None:
        make_draft(folder / "draft", draft)
        network = open_draft(str(folder / "draft"))
        export_draft(network, source, folder / "draft_bundle", DraftOptions("fp32"))
        plan = replace(plan, max_draft_tree_size=12)
        _build("draft", folder / "draft_bundle", found.engine, plan)
        options = replace(options, draft_model_dir=str(folder / "draft"))
    export_llm(source, folder / "bundle", options)
    export_audio(source, folder / "audio_bundle", EncoderOptions("fp32"))
    _build("llm", folder / "bundle", found.engine, plan)
    _build("audio", folder / "audio_bundle", found.audio_engine, audio_plan(8, 1))
    return found


def _build(product: str, bundle: Path, engine: Path, plan: Plan) -> None:
    build_engine(product, bundle, engine, plan, "onnxruntime", lambda _: None)


class AudioReference:
    """The checkpoint and its processor in transformers."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        from transformers import AutoModelForMultimodalLM, PreTrainedTokenizerFast

        self.model = AutoModelForMultimodalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.model_type = self.model.config.model_type
        self.extractor = extractor(json.loads((checkpoint / "config.json").read_text()))
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
        self.placeholder, self.token = PLACEHOLDERS[self.model_type]

    def inputs(self, text: str, clips: list[np.ndarray]) -> dict[str, Any]:
        """What the processor makes of a prompt with placeholders."""
        if self.model_type == "voxtral":
            return self._voxtral(text, clips)
        if self.model_type.startswith("gemma4"):
            return self._gemma4(text, clips)
        from transformers.models.qwen3_asr.processing_qwen3_asr import Qwen3ASRProcessor

        processor = Qwen3ASRProcessor(self.extractor, self.tokenizer)
        return dict(processor(text=[text], audio=clips, sampling_rate=16000))

    def _voxtral(self, text: str, clips: list[np.ndarray]) -> dict[str, Any]:
        """Features by the processor, which tokenizes with mistral-common only."""
        from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

        frames = 2 * self.model.config.audio_config.max_source_positions
        given = {**VoxtralProcessor.audio_kwargs, "pad_to_multiple_of": 160 * frames}
        given["max_source_positions"] = frames
        holder: Any = SimpleNamespace(feature_extractor=self.extractor)
        features = VoxtralProcessor._retrieve_input_features(holder, clips, **given)
        counts = [len(self._features(input_features=each[None])) for each in features]
        assert len(clips) == 1
        text = text.replace(self.token, self.token * sum(counts))
        return {**self.tokenizer(text, return_tensors="pt"), "input_features": features}

    def _gemma4(self, text: str, clips: list[np.ndarray]) -> dict[str, Any]:
        """Features and tokens by parts of the processor, which needs an image processor, too."""
        import torch
        from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
        from transformers.models.gemma4_unified.processing_gemma4_unified import (
            Gemma4UnifiedProcessor,
        )

        found = dict(self.extractor(clips, return_tensors="pt", sampling_rate=16000))
        kinds = {"gemma4": Gemma4Processor, "gemma4_unified": Gemma4UnifiedProcessor}
        texts = dict(zip(("boa_token", "audio_token", "eoa_token"), GEMMA, strict=True))
        holder: Any = SimpleNamespace(**texts)
        own = kinds[self.model_type].replace_audio_token(holder, found, 0)
        ids = self.tokenizer(text.replace(self.token, own), return_tensors="pt")
        types = torch.where(ids["input_ids"] == self.model.config.audio_token_id, 3, 0)
        return {**ids, **found, "mm_token_type_ids": types}

    def features(self, samples: np.ndarray) -> np.ndarray:
        """Features of a clip, [frames, mel bins or samples]."""
        inputs = self.inputs(self.placeholder, [samples])
        found = inputs["input_features"].numpy()
        if self.model_type.startswith("gemma4"):
            return found[0][inputs["input_features_mask"][0].numpy()]
        return np.concatenate([*found], axis=-1).T

    def rows(self, samples: np.ndarray) -> np.ndarray:
        """The encoder's rows of a clip."""
        inputs = self.inputs(self.placeholder, [samples])
        named = ("input_features", "input_features_mask")
        return self._features(**{name: inputs[name] for name in named if name in inputs})

    def _features(self, **inputs: Any) -> np.ndarray:
        import torch

        with torch.no_grad():
            found = self.model.model.get_audio_features(**inputs)
        if self.model_type.startswith("gemma4"):
            return found.pooler_output[found.attention_mask].numpy()
        return found.pooler_output.numpy()

    def logprobs(self, text: str, clips: list[np.ndarray]) -> np.ndarray:
        """Log-probabilities of the first token after a prompt, [V]."""
        import torch

        inputs = self.inputs(text, clips)
        if self.model_type == "gemma4_unified":
            rows = {3: torch.from_numpy(self.rows(clips[0]))}
            logits = whole_pass(self.model, inputs["input_ids"], inputs["mm_token_type_ids"], rows)
        else:
            with torch.no_grad():
                logits = self.model(**inputs).logits
        return torch.log_softmax(logits[0, -1], -1).numpy()

    def answer(self, text: str, clips: list[np.ndarray], count: int) -> tuple[list[int], list[int]]:
        """Ids of the prompt, and greedy ids after it."""
        import torch

        inputs = self.inputs(text, clips)
        if self.model_type == "gemma4_unified":
            rows = torch.from_numpy(self.rows(clips[0]))
            ids, kinds = inputs["input_ids"], inputs["mm_token_type_ids"]
            return ids[0].tolist(), by_whole_passes(self.model, ids, kinds, {3: rows}, count)
        with torch.no_grad():
            found = self.model.generate(
                **inputs, max_new_tokens=count, do_sample=False, eos_token_id=2
            )
        ids = inputs["input_ids"][0].tolist()
        return ids, found[0, len(ids) :].tolist()


def publish_qwen3_asr(source: Path, folder: Path) -> Path:
    """A checkpoint of transformers' Qwen3-ASR, written as Qwen publishes its own.

    Args:
        source: of `make_audio_model`.
        folder: is written.
    """
    from safetensors.torch import load_file, save_file

    prefixes = {
        "model.language_model.": "thinker.model.",
        "lm_head.": "thinker.lm_head.",
        "model.audio_tower.": "thinker.audio_tower.",
        "model.multi_modal_projector.linear_1.": "thinker.audio_tower.proj1.",
        "model.multi_modal_projector.linear_2.": "thinker.audio_tower.proj2.",
    }
    folder.mkdir()
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        (old,) = (prefix for prefix in prefixes if name.startswith(prefix))
        tensors[prefixes[old] + name.removeprefix(old)] = tensor
    if "thinker.lm_head.weight" not in tensors:  # published beside the embedding that it is tied to
        tensors["thinker.lm_head.weight"] = tensors["thinker.model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(_published_config(config), indent=2))
    extractor_config = {
        "chunk_length": 30,
        "dither": 0.0,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": config["audio_config"]["num_mel_bins"],
        "hop_length": 160,
        "n_fft": 400,
        "n_samples": 480000,
        "nb_max_frames": 3000,
        "padding_side": "right",
        "padding_value": 0.0,
        "processor_class": "Qwen3ASRProcessor",
        "return_attention_mask": True,
        "sampling_rate": 16000,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor_config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], "top_k": 1}))
    tokenizer = json.loads((source / "tokenizer_config.json").read_text())
    template = {"chat_template": tokenizer.pop("chat_template")}
    (folder / "chat_template.json").write_text(json.dumps(template))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    return folder


def _published_config(config: dict[str, Any]) -> dict[str, Any]:
    """As transformers 4.57 saves the configs of the package qwen-asr, without null values."""
    unused = {
        "add_cross_attention": False,
        "chunk_size_feed_forward": 0,
        "return_dict": True,
        "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
        "pruned_heads": {},
    }
    hearing, text = dict(config["audio_config"]), dict(config["text_config"])
    del hearing["max_position_embeddings"]
    hearing |= {
        "model_type": "qwen3_asr_audio_encoder",
        "max_source_positions": 1500,
        "conv_chunksize": 500,
        "num_hidden_layers": hearing["encoder_layers"],
        "tie_word_embeddings": True,
    }
    theta = text.pop("rope_parameters")["rope_theta"]
    text |= {
        "model_type": "qwen3_asr_text",
        "rope_theta": theta,
        "rope_scaling": {
            "interleaved": True,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
            "rope_type": "default",
            "type": "default",
        },
        "tie_word_embeddings": config["tie_word_embeddings"],
        "num_experts": 0,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
    }
    thinker = {
        "model_type": "qwen3_asr",
        "audio_config": hearing | unused,
        "text_config": text | unused,
        "audio_token_id": config["audio_token_id"],
        "audio_start_token_id": [*WORDS, *SPECIAL].index(QWEN[0]),
        "audio_end_token_id": [*WORDS, *SPECIAL].index(QWEN[2]),
        "user_token_id": WORDS.index("user"),
        "initializer_range": 0.02,
        "dtype": "bfloat16",
    }
    return {
        "architectures": ["Qwen3ASRForConditionalGeneration"],
        "model_type": "qwen3_asr",
        "support_languages": ["Chinese", "English"],
        "thinker_config": thinker,
        "transformers_version": "4.57.6",
    }
