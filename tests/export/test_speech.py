"""Speech models at tiny random size: portable graphs and engines compute as transformers does."""

from __future__ import annotations

import json
import shutil

import numpy as np
import onnxruntime
import pytest
import torch
from conftest import assert_one_line_error
from lora_adapters import reference, write_adapter
from portable import TOLERANCE
from speech_checkpoints import DECODING, IDS, build_speech, load_speech, make_speech

from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.core import graph_io
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import (
    ENCODER_HASH,
    LLM_BUNDLE,
    LLM_ENGINE,
    load_bundle,
    load_engine,
)
from edgellm.device_runtime.networks.speech import open_speech
from edgellm.export import speech
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm, understand
from edgellm.export.pipeline.open_checkpoint import open_checkpoint

TOKENS = np.random.default_rng(1).integers(0, 161, 20)
ONNXRUNTIME = CpuOptions(kernels="onnxruntime")


@pytest.fixture(scope="module")
def features():
    return np.random.default_rng(0).standard_normal((80, 100), np.float32)


@pytest.fixture(scope="module")
def expected(speech_checkpoint, features):
    """Transformers' logits, hidden states, and keys and values of audio by contract name."""
    model, window = load_speech(speech_checkpoint), torch.from_numpy(features)[None]
    with torch.no_grad():
        hidden = model.model.encoder(window).last_hidden_state
        logits = model(
            encoder_outputs=(hidden,), decoder_input_ids=torch.from_numpy(TOKENS)[None]
        ).logits[0]
        cross = {
            graph_io.cross_name(index, part): project(hidden).view(1, -1, 3, 16).transpose(1, 2)
            for index, layer in enumerate(model.model.decoder.layers)
            for part, project in (
                ("key", layer.encoder_attn.k_proj),
                ("value", layer.encoder_attn.v_proj),
            )
        }
    cross[graph_io.ENCODER_HIDDEN] = hidden
    return logits.numpy(), {name: each.numpy() for name, each in cross.items()}


def test_graphs_of_audio_give_hidden_states_and_keys_and_values(speech_engine, features, expected):
    inputs, found = {graph_io.INPUT_FEATURES: features[None]}, {}
    for name in ("audio_encoder", "cross_kv"):
        session = onnxruntime.InferenceSession(speech_engine.parent / "bundle" / f"{name}.onnx")
        names = [each.name for each in session.get_outputs()]
        inputs = dict(zip(names, session.run(names, inputs), strict=True))
        found.update(inputs)
    assert found.keys() == expected[1].keys()
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[1][name], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("precision", ["none", "int8"])
def test_bits_do_not_depend_on_the_tokens_of_a_pass(
    speech_engine, speech_checkpoint, features, tmp_path, precision
):
    """Nor those of attention to audio, so that several tokens are verified at once."""
    engine = speech_engine
    if precision != "none":
        shutil.copytree(speech_engine.parent / "bundle", tmp_path / "bundle")
        engine = build_speech(tmp_path, speech_checkpoint, quantize=precision)
    network = open_speech(engine, load_engine(engine, LLM_ENGINE))
    network.listen(network.encode(features))
    single = [network.next_logits(TOKENS[at : at + 1]).copy() for at in range(len(TOKENS))]
    for size in (2, 5, 20):
        network.restart()
        for at in range(0, len(TOKENS), size):
            some = TOKENS[at : at + size]
            found = network.logits(some, np.arange(len(some)))
            np.testing.assert_array_equal(found, single[at : at + size])


def _require_logits(engine, features, expected, allowed=TOLERANCE):
    network = open_speech(engine, load_engine(engine, LLM_ENGINE))
    network.listen(network.encode(np.zeros_like(features)))  # another window before
    network.next_logits(TOKENS[:3])
    network.listen(network.encode(features))
    found = [network.next_logits(TOKENS[:5]).copy()]
    found += [network.next_logits(TOKENS[at : at + 1]).copy() for at in range(5, len(TOKENS))]
    error = np.abs(np.array(found) - expected[0][4:]).max()
    assert error <= allowed
    return error


def test_engines_give_the_logits_of_transformers(
    speech_engine, speech_checkpoint, features, expected, tmp_path
):
    _require_logits(speech_engine, features, expected)
    shutil.copytree(speech_engine.parent / "bundle", tmp_path / "bundle")
    engine = build_speech(tmp_path, speech_checkpoint, options=ONNXRUNTIME)
    _require_logits(engine, features, expected)


@pytest.mark.parametrize(
    ("precision", "allowed"),
    [("int8", 0.5), pytest.param("int4", 2.5, marks=pytest.mark.nightly)],
)
def test_rounded_weights(
    speech_engine, speech_checkpoint, features, expected, tmp_path, precision, allowed
):
    """The build compares both graphs with the portable ones; logits reach 8."""
    shutil.copytree(speech_engine.parent / "bundle", tmp_path / "bundle")
    engine = build_speech(tmp_path, speech_checkpoint, quantize=precision)
    checks = load_engine(engine, LLM_ENGINE).options["checks"]
    roles = ["decoder", "audio_encoder", "cross_kv"]
    assert [each.partition(" passed")[0] for each in checks] == roles
    assert _require_logits(engine, features, expected, allowed) > TOLERANCE


def test_half_precision_keeps_the_bits_of_weights(speech_checkpoint, features, expected, tmp_path):
    """Float32 weights are rounded to float16, in which the engine does not compute."""
    engine = build_speech(tmp_path, speech_checkpoint, dtype="fp16")
    _require_logits(engine, features, expected, 0.05)


def test_adapters_are_merged(speech_engine, speech_checkpoint, features, tmp_path):
    """Of all attention, that of the encoder included, or of the decoder's own tokens alone."""
    for name, targets in (
        ("all", ("q_proj", "v_proj")),
        ("decoder", tuple(f"decoder.layers.{at}.self_attn.q_proj" for at in range(3))),
    ):
        folder = tmp_path / name
        adapter = write_adapter(folder / "adapter", speech_checkpoint, targets=targets)
        kind = "WhisperForConditionalGeneration"
        model = reference(speech_checkpoint, adapter, {"": 2.0}, kind=kind)
        with torch.no_grad():
            logits = model(
                input_features=torch.from_numpy(features)[None],
                decoder_input_ids=torch.from_numpy(TOKENS)[None],
            ).logits[0]
        options = ExportOptions(dtype="fp32", lora_dir=str(adapter))
        export_llm(open_checkpoint(str(speech_checkpoint)), folder / "bundle", options)
        engine = build_speech(folder, speech_checkpoint)
        _require_logits(engine, features, (logits.numpy(), {}))
        has_same_encoder = _encoder_hash(engine) == _encoder_hash(speech_engine)
        assert has_same_encoder == (name == "decoder")


def _encoder_hash(engine):
    """The hash of the encoder of an engine."""
    return load_engine(engine, LLM_ENGINE).provenance[ENCODER_HASH]


def test_fewer_layers(speech_checkpoint, tmp_path):
    options = ExportOptions(num_layers=1)
    bundle = export_llm(open_checkpoint(str(speech_checkpoint)), tmp_path / "bundle", options)
    session = onnxruntime.InferenceSession(tmp_path / "bundle" / "cross_kv.onnx")
    assert [each.name for each in session.get_outputs()] == ["cross.0.key", "cross.0.value"]
    assert bundle.decoder.kv.num_layers == 1


@pytest.fixture
def changed(speech_checkpoint, tmp_path):
    """Export a copy with other values in one of its JSON files; None removes a key."""

    def export(name, **values):
        folder = tmp_path / "changed"
        shutil.copytree(speech_checkpoint, folder)
        content = {**json.loads((folder / name).read_text()), **values}
        kept = {key: value for key, value in content.items() if value is not None}
        (folder / name).write_text(json.dumps(kept))
        understand(open_checkpoint(str(folder)), ExportOptions())
        return folder

    return export


@pytest.mark.parametrize(
    ("name", "values", "fragment"),
    [
        ("preprocessor_config.json", {"hop_length": 200}, "hop_length 200"),
        ("preprocessor_config.json", {"chunk_length": 30}, "chunk_length 30"),
        ("config.json", {"scale_embedding": True}, "scale_embedding"),
        ("config.json", {"decoder_attention_heads": 5}, "d_model 48"),
        ("config.json", {"unknown_rule": 3}, "unknown_rule"),
        ("generation_config.json", {"suppress_tokens": ["x"]}, "suppress_tokens has 'x'"),
        ("generation_config.json", {"alignment_heads": [[0, 3]]}, "no head"),
        ("config.json", {"median_filter_width": 4}, "median_filter_width 4"),
    ],
)
def test_unsupported_models_are_rejected(changed, name, values, fragment):
    with pytest.raises(EdgeLLMError, match=fragment) as caught:
        changed(name, **values)
    assert caught.value.hint or "is not supported" in str(caught.value)


def test_tokens_of_prompts_are_those_of_the_tokenizer_if_nothing_else_names_them(changed, tmp_path):
    keys = ("lang_to_id", "task_to_id", "no_timestamps_token_id", "decoder_start_token_id")
    folder = changed("generation_config.json", **dict.fromkeys(keys))
    export_llm(open_checkpoint(str(folder)), tmp_path / "bundle", ExportOptions())
    audio = load_bundle(tmp_path / "bundle", LLM_BUNDLE).decoder.audio
    assert audio is not None
    assert audio.languages == {"en": IDS["<|en|>"], "de": IDS["<|de|>"]}
    assert audio.tasks == DECODING["task_to_id"]
    assert audio.no_timestamps_id == DECODING["no_timestamps_token_id"]
    assert audio.start_id == DECODING["decoder_start_token_id"]


def test_flags_of_language_models_are_rejected(command_here, speech_checkpoint, tmp_path):
    given = "edgellm-export", "llm", "--model_dir", speech_checkpoint, "--output_dir"
    result = command_here(*given, tmp_path / "bundle", "--is_eagle_base")
    assert_one_line_error(result, "--is_eagle_base: not for speech models", "leave it out")
    result = command_here(*given, tmp_path / "bundle", "--verify")
    assert_one_line_error(result, "--verify compares texts", "leave out --verify")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (("--maxVerifyTreeSize", 9), "--maxVerifyTreeSize: not for speech models"),
        (("--backend", "onnxruntime", "--device", "cuda"), "attention to audio"),
    ],
)
def test_plans_that_speech_models_do_not_have(
    command_here, speech_engine, tmp_path, flags, fragment
):
    bundle = speech_engine.parent / "bundle"
    result = command_here("llm_build", "--onnxDir", bundle, "--engineDir", tmp_path / "x", *flags)
    assert_one_line_error(result, fragment)
    assert not (tmp_path / "x").exists()


def test_every_speech_model_is_tested():
    assert speech.supported() == ["whisper"]


@pytest.mark.nightly
def test_separate_heads_and_more_mel_bins(tmp_path):
    """As large-v3 has 128 mel bins; a head of its own is not tied to the embedding."""
    checkpoint = make_speech(
        tmp_path / "model", seed=5, num_mel_bins=128, tie_word_embeddings=False
    )
    model = load_speech(checkpoint)
    features = np.random.default_rng(2).standard_normal((128, 100), np.float32)
    with torch.no_grad():
        logits = model(
            torch.from_numpy(features)[None], decoder_input_ids=torch.from_numpy(TOKENS)[None]
        ).logits[0]
    _require_logits(build_speech(tmp_path, checkpoint), features, (logits.numpy(), {}))


def test_inspect_counts_all_graphs(command_here, speech_engine):
    for folder in (speech_engine, speech_engine.parent / "bundle"):
        result = command_here("edgellm-inspect", folder, "--json")
        found = json.loads(result.stdout)
        assert len(found["graphs"]) == 3
        assert found["facts"]["audio"] == "windows of 1 s, 80 mel bins, 2 languages"
