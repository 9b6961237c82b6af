"""Audio encoders of chat models: configs, layouts and commands, against transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from audio_checkpoints import AudioReference, make_audio_model
from conftest import assert_one_line_error
from speech_checkpoints import chirp

from edgellm.core.manifest import AUDIO_BUNDLE, load_bundle
from edgellm.export import audio
from edgellm.export.pipeline.audio import export_audio
from edgellm.export.pipeline.encoder import EncoderOptions
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.multimodal.audio_features import prepare

# Values of audio_config that differ from those of TINY and of public models
CONFIGS = {
    "qwen3_asr": {
        "n_window_infer": 300,
        "num_mel_bins": 20,
        "downsample_hidden_size": 5,
        "activation_function": "silu",
        "encoder_layers": 1,
    },
    "voxtral": {
        "num_mel_bins": 20,
        "max_source_positions": 100,
        "activation_function": "silu",
        "intermediate_size": 128,
    },
    "gemma4": {
        "attention_chunk_size": 4,
        "attention_context_left": 6,
        "attention_context_right": 3,
        "attention_logit_cap": 5.0,
        "conv_kernel_size": 3,
        "residual_weight": 0.3,
        "gradient_clipping": 2.0,
        "use_clipped_linears": False,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-3,
    },
    "gemma4_unified": {"rms_norm_eps": 1e-2},
}


class _Portable:
    """A checkpoint's bundle in ONNX Runtime."""

    def __init__(self, checkpoint: Path, folder: Path, dtype: str = "fp32", rounds: str = "none"):
        source = open_checkpoint(str(checkpoint), tokenizer=False)
        export_audio(source, folder, EncoderOptions(dtype, quantization=rounds))
        self.manifest = load_bundle(folder, AUDIO_BUNDLE)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(folder / "model.onnx", options)

    def rows(self, samples):
        clip = prepare(samples, self.manifest.audio_encoder)
        given = {
            name: array.astype(self.manifest.dtype) if array.dtype == np.float32 else array
            for name, array in clip.inputs.items()
        }
        return np.asarray(self.session.run(None, given)[0], np.float32)[: clip.num_tokens]


@pytest.mark.parametrize("model_type", audio.supported())
def test_other_configs(model_type, tmp_path):
    checkpoint = make_audio_model(tmp_path / "model", model_type, hearing=CONFIGS[model_type])
    portable, reference = _Portable(checkpoint, tmp_path / "bundle"), AudioReference(checkpoint)
    for seconds in (0.4, 3.1):
        samples = chirp(seconds)
        np.testing.assert_allclose(portable.rows(samples), reference.rows(samples), atol=2e-4)


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=[] if name == "gemma4" else pytest.mark.nightly)
     for name in audio.supported()],
)  # fmt: skip
@pytest.mark.parametrize(
    ("dtype", "rounds", "limit"), [("fp16", "none", 0.02), ("fp32", "int8", 0.2)]
)
def test_other_precisions(model_type, dtype, rounds, limit, tmp_path):
    checkpoint, samples = make_audio_model(tmp_path / "model", model_type), chirp(1.3)
    exact = _Portable(checkpoint, tmp_path / "exact").rows(samples)
    rounded = _Portable(checkpoint, tmp_path / "rounded", dtype, rounds)
    error = np.linalg.norm(rounded.rows(samples) - exact) / np.linalg.norm(exact)
    assert 0 < error < limit
    assert rounded.manifest.quantization == rounds


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_audio_model(tmp_path_factory.mktemp("model"), "qwen3_asr")


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config", {"n_window": 40}, "n_window = 40 is not supported"),
        ("config", {"n_window_infer": 250}, "n_window_infer 250 is no multiple of 100 frames"),
        ("config", {"output_dim": 40}, "output_dim = 40 is not supported"),
        ("config", {"max_position_embeddings": 12}, "max_position_embeddings 12 is less than"),
        ("config", {"encoder_attention_heads": 3}, "heads 3 does not divide a width of 32"),
        ("config", {"streams": 2}, "keys that edgellm does not understand: streams"),
        ("config", {"conv_bias": True, "d_model": 40}, "audio_tower"),
        ("preprocessor", {"sampling_rate": 8000}, "sampling_rate 8000 is not supported"),
        ("preprocessor", {"feature_size": 80}, "feature_size 80 is not supported, only 16"),
    ],
)
def test_configs_that_are_rejected(checkpoint, command_here, tmp_path, file, change, message):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    path = folder / ("config.json" if file == "config" else "preprocessor_config.json")
    values = json.loads(path.read_text())
    (values["audio_config"] if file == "config" else values).update(change)
    path.write_text(json.dumps(values))
    result = command_here(
        "edgellm-export", "audio", "--model_dir", folder, "--output_dir", tmp_path / "out",
        "--ignore_config_keys", "conv_bias",
    )  # fmt: skip
    assert_one_line_error(result, message)
    assert not (tmp_path / "out").exists()


def test_commands(checkpoint, tiny_checkpoint, command_here, tmp_path):
    bundle, engine = tmp_path / "bundle", tmp_path / "engine"
    made = ("edgellm-export", "audio", "--output_dir", bundle, "--model_dir")
    assert_one_line_error(command_here(*made, tiny_checkpoint), "no audio encoder of a chat model")
    result = command_here(
        "edgellm-export", "visual", "--output_dir", bundle, "--model_dir", checkpoint
    )
    assert_one_line_error(result, "is an audio model (qwen3_asr): it has no visual encoder")
    result = command_here(*made, checkpoint)
    assert result.returncode == 0
    assert f"{bundle}: audio encoder of qwen3_asr" in result.stdout
    build = ("audio_build", "--onnxDir", bundle, "--engineDir", engine, "--maxAudioSeconds", "5")
    result = command_here(*build, "--dryRun")
    assert (result.returncode, engine.exists()) == (0, False)
    result = command_here(*build, "--quantize", "int8")
    assert result.returncode == 0, result.stderr
    assert "qwen3_asr encoder" in result.stdout
    for folder, text in ((bundle, "ONNX bundle of an audio encoder"), (engine, "audio engine")):
        result = command_here("edgellm-inspect", folder)
        assert text in result.stdout
    assert "5 s" in result.stdout
    result = command_here("visual_build", "--onnxDir", bundle, "--engineDir", tmp_path / "other")
    assert_one_line_error(result, "is of kind audio_bundle, not visual_bundle")
