"""Tiny random speech models with Whisper's special tokens, their engines, and sounds."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.speech import whisper

SILERO = Path(__file__).with_name("silero_vad.txt")  # the package of speech detection
# Text, then special tokens in Whisper's order, then timestamps of a window of one second
TEXT_TOKENS = 100
SPECIAL = tuple(
    f"<|{name}|>"
    for name in (
        *("endoftext", "startoftranscript", "en", "de", "translate", "transcribe"),
        *("startoflm", "startofprev", "nospeech", "notimestamps"),
    )
)
IDS = {text: TEXT_TOKENS + index for index, text in enumerate(SPECIAL)}
FIRST_TIMESTAMP = TEXT_TOKENS + len(SPECIAL)
DECODING: dict[str, Any] = {
    "decoder_start_token_id": IDS["<|startoftranscript|>"],
    "bos_token_id": IDS["<|endoftext|>"],
    "eos_token_id": IDS["<|endoftext|>"],
    "pad_token_id": IDS["<|endoftext|>"],
    "max_length": whisper.TINY["max_target_positions"],
    "is_multilingual": True,
    "lang_to_id": {name: IDS[name] for name in ("<|en|>", "<|de|>")},
    "task_to_id": {name: IDS[f"<|{name}|>"] for name in ("transcribe", "translate")},
    "no_timestamps_token_id": IDS["<|notimestamps|>"],
    "prev_sot_token_id": IDS["<|startofprev|>"],
    "max_initial_timestamp_index": 25,
    "suppress_tokens": [3, 17, *(IDS[name] for name in SPECIAL[1:-1])],
    "begin_suppress_tokens": [5, IDS["<|endoftext|>"]],
    "alignment_heads": [[2, 1], [1, 0], [1, 2]],
}
# Options of a transcript that computes as `generate` does without thresholds
GREEDY: dict[str, Any] = {
    "temperatures": (0.0,),
    "no_speech_threshold": None,
    "condition_on_prev_tokens": False,
}
ENGLISH = {"is_multilingual": False, "lang_to_id": None, "task_to_id": None}


def make_speech(folder: Path, seed: int = 0, decoding: Any = None, **config: Any) -> Path:
    """A randomly initialized Whisper of windows of one second, or as many as `config` has.

    Args:
        folder: is written.
        seed: of the weights.
        decoding: changes of `DECODING`; None removes a key.
        config: changes of `whisper.TINY`.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    values = {**whisper.TINY, **config, "init_std": 0.3}
    values.pop("model_type")
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**values))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.2)
    chosen = {
        key: value for key, value in {**DECODING, **(decoding or {})}.items() if value is not None
    }
    model.generation_config = transformers.GenerationConfig(**chosen)
    model.save_pretrained(folder)
    features = transformers.WhisperFeatureExtractor(
        feature_size=values["num_mel_bins"], chunk_length=values["max_source_positions"] // 50
    )
    features.save_pretrained(folder)
    write_speech_tokenizer(folder, values["max_source_positions"])
    return folder


def make_deaf(folder: Path) -> Path:
    """A model with windows of three seconds whose text, without times, is always the same."""
    from safetensors.numpy import load_file, save_file

    sizes = {"max_source_positions": 150, "vocab_size": FIRST_TIMESTAMP + 151}
    times = range(FIRST_TIMESTAMP, sizes["vocab_size"])
    make_speech(folder, 7, {"suppress_tokens": [*DECODING["suppress_tokens"], *times]}, **sizes)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith("encoder_attn.out_proj.weight"):
            tensors[name] = np.zeros_like(tensors[name])
    save_file(tensors, path, {"format": "pt"})
    return folder


def write_speech_tokenizer(folder: Path, positions: int) -> None:
    """A word-level tokenizer whose words begin with a space, and Whisper's added tokens."""
    table = {f"▁w{index}": index for index in range(TEXT_TOKENS)}
    tokenizer = Tokenizer(tokenizer_models.WordLevel(table, unk_token="▁w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([*SPECIAL])
    times = [f"<|{step / 50:.2f}|>" for step in range(positions + 1)]
    tokenizer.add_tokens([AddedToken(time, normalized=False) for time in times])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def load_speech(folder: Path) -> Any:
    """Transformers' model of a checkpoint, in float32."""
    import torch
    import transformers

    kind = transformers.WhisperForConditionalGeneration
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def build_speech(folder: Path, checkpoint: Path, dtype: str = "fp32", **plan: Any) -> Path:
    """The engine of a checkpoint for a CPU, in float32 by default; the bundle is next to it."""
    bundle, engine = folder / "bundle", folder / "engine"
    if not bundle.exists():
        export_llm(open_checkpoint(str(checkpoint)), bundle, ExportOptions(dtype=dtype))
    capacity = load_bundle(bundle, LLM_BUNDLE).decoder.max_positions
    limits = {"max_input_len": capacity, "kv_capacity": capacity, "threads": 1, "quantize": "none"}
    build_engine("llm", bundle, engine, Plan(**{**limits, **plan}), "onnxruntime", lambda _: None)
    return engine


def chirp(seconds: float, seed: int = 0) -> NDArray[np.float32]:
    """A tone of changing pitch with noise, float32 at 16 kHz."""
    at = np.arange(int(16000 * seconds)) / 16000
    noise = np.random.default_rng(seed).standard_normal(len(at))
    tone = np.sin(2 * np.pi * (200 + 300 * np.sin(8 * at)) * at)
    return (0.3 * tone + 0.05 * noise).astype(np.float32)


def write_wav(path: Any, samples: NDArray[np.float32], rate: int = 16000) -> Path:
    """A WAV file of 16-bit samples, mono or [N, channels]; `path` may be an open file."""
    with wave.open(str(path) if isinstance(path, Path) else path, "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).round().astype("<i2").tobytes())
    return path
