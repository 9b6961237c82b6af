"""`AudioSpec` of a speech model: its windows, and the tokens of its prompts.

They are in generation_config.json. Older checkpoints lack some, which the tokenizer has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from edgellm.core.errors import BrokenArtifactError, UnsupportedModelError
from edgellm.core.model_spec import AudioSpec
from edgellm.export.checkpoints.checkpoint import Checkpoint
from edgellm.export.config.reader import ConfigReader

_TOKENIZER = "tokenizer.json"
_PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_TASKS = ("transcribe", "translate")
_MULTILINGUAL = 51865  # smallest vocabulary of models with languages, which lack one token less
_FRAMES_PER_S = 100
_FILTER_WIDTH = 7
# What log-mel features are computed by; see `edgellm.multimodal.log_mel`
_FEATURES = {"sampling_rate": 16000, "n_fft": 400, "hop_length": 160, "dither": 0.0}


def read_audio(
    checkpoint: Checkpoint, *, num_mel_bins: int, num_positions: int, heads: tuple[int, int]
) -> AudioSpec:
    """The audio that a checkpoint transcribes.

    Args:
        checkpoint: of the speech model.
        num_mel_bins: of its features.
        num_positions: of its encoder in a window.
        heads: number of the decoder's layers, and of heads of attention to audio in each.

    Raises:
        UnsupportedModelError: other features than Whisper's, or wrong values.
        BrokenArtifactError: tokens of prompts are missing.
    """
    _require_features(checkpoint, num_mel_bins, num_positions)
    given, vocabulary = _given(checkpoint), _added_tokens(checkpoint)
    languages = _languages(given, vocabulary)
    start = given.optional("decoder_start_token_id", int)
    plain = given.optional("no_timestamps_token_id", int)
    return AudioSpec(
        num_mel_bins=num_mel_bins,
        num_positions=num_positions,
        num_heads=heads[1],
        start_id=_token(checkpoint, "<|startoftranscript|>", start, vocabulary),
        languages=languages,
        tasks=_tasks(given, vocabulary) if languages else {},
        no_timestamps_id=_token(checkpoint, "<|notimestamps|>", plain, vocabulary),
        max_initial_timestamp=given.optional("max_initial_timestamp_index", int),
        suppressed=_ids(given, "suppress_tokens"),
        suppressed_first=_ids(given, "begin_suppress_tokens"),
        alignment_heads=_alignment_heads(given, *heads),
        median_filter_width=_filter_width(given),
    )


def _alignment_heads(
    given: ConfigReader, num_layers: int, num_heads: int
) -> tuple[tuple[int, int], ...]:
    """Layers and heads that follow the words; all of the later half if they are not given."""
    later = [(at, head) for at in range(num_layers // 2, num_layers) for head in range(num_heads)]
    found = given.read("alignment_heads", list, [])
    for each in found:
        is_pair = isinstance(each, list) and len(each) == 2 and all(type(n) is int for n in each)
        if not is_pair or not (each[0] >= 0 and 0 <= each[1] < num_heads):
            raise UnsupportedModelError(
                f"generation_config.json: alignment_heads has {each!r}, which is no head",
                hint="correct it in generation_config.json: pairs of a layer and a head",
            )
    kept = sorted({(layer, head) for layer, head in found if layer < num_layers})
    return tuple(kept or later)


def _filter_width(given: ConfigReader) -> int:
    width = given.positive("median_filter_width", _FILTER_WIDTH)
    if width % 2 == 0:
        raise UnsupportedModelError(
            f"config.json: median_filter_width {width} is even", hint="give an odd number"
        )
    return width


def _given(checkpoint: Checkpoint) -> ConfigReader:
    """Values of generation_config.json, or of config.json if there is no such file."""
    values = checkpoint.generation_config or checkpoint.config
    sizes = {key: checkpoint.config.get(key) for key in ("vocab_size", "median_filter_width")}
    return ConfigReader({**values, **sizes})


def _languages(given: ConfigReader, vocabulary: Mapping[str, int]) -> dict[str, int]:
    """Token ids by code; {} of an English-only model."""
    vocab_size = given.positive("vocab_size", _MULTILINGUAL)
    found = given.optional("lang_to_id", dict)
    if not given.read("is_multilingual", bool, found is not None or vocab_size >= _MULTILINGUAL):
        return {}
    tokens = vocabulary if found is None else found
    codes = {_LANGUAGE.fullmatch(token): token_id for token, token_id in tokens.items()}
    return {match[1]: token_id for match, token_id in codes.items() if match is not None}


def _tasks(given: ConfigReader, vocabulary: Mapping[str, int]) -> dict[str, int]:
    named = {f"<|{task}|>": task for task in _TASKS}
    own = {task: vocabulary[text] for text, task in named.items() if text in vocabulary}
    found: dict[str, Any] = given.read("task_to_id", dict, own)
    return {task: found[task] for task in _TASKS if type(found.get(task)) is int}


def _token(
    checkpoint: Checkpoint, text: str, given: int | None, vocabulary: Mapping[str, int]
) -> int:
    found = vocabulary.get(text) if given is None else given
    if found is None:
        raise BrokenArtifactError(
            f"{checkpoint.label}: neither generation_config.json nor the tokenizer has {text}",
            hint="copy generation_config.json of the published model into the folder",
        )
    return found


def _ids(given: ConfigReader, key: str) -> tuple[int, ...]:
    """A list of token ids; () if it is absent."""
    found = given.read(key, list, [])
    if wrong := [each for each in found if type(each) is not int or each < 0]:
        raise UnsupportedModelError(
            f"generation_config.json: {key} has {wrong[0]!r}, which is no token",
            hint="correct it in generation_config.json",
        )
    return tuple(found)


def _added_tokens(checkpoint: Checkpoint) -> dict[str, int]:
    """Ids of the tokenizer's added tokens by text."""
    content = checkpoint.tokenizer_files.get(_TOKENIZER, b"{}")
    return {each["content"]: each["id"] for each in json.loads(content).get("added_tokens", [])}


def _require_features(checkpoint: Checkpoint, num_mel_bins: int, num_positions: int) -> None:
    """Reject features that `edgellm.multimodal.log_mel` does not compute."""
    files = checkpoint.processor_files
    name = next((name for name in _PREPROCESSORS if name in files), "")
    values: dict[str, Any] = json.loads(files.get(name, b"{}"))
    values = values.get("feature_extractor", values)
    seconds = 2 * num_positions / _FRAMES_PER_S
    wanted = {"feature_size": num_mel_bins, "chunk_length": seconds, **_FEATURES}
    for key, value in wanted.items():
        if values.get(key, value) != value:
            raise UnsupportedModelError(
                f"preprocessor_config.json: {key} {values[key]!r} is not supported, only {value:g}",
                hint="use preprocessor_config.json and config.json as the model was published",
            )
