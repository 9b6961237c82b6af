"""Engines of audio encoders for GPUs: compiled, and for CUDA run on the CPU."""

from __future__ import annotations

import cuda_on_cpu
import numpy as np
import pytest
from audio_checkpoints import AudioReference, make_audio_model
from speech_checkpoints import chirp

from edgellm.build.backends import options_of
from edgellm.build.engine import build_engine
from edgellm.build.plan import audio_plan
from edgellm.core.manifest import AUDIO_ENGINE
from edgellm.export import audio
from edgellm.export.pipeline.audio import export_audio
from edgellm.export.pipeline.encoder import EncoderOptions
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.multimodal.audio_features import prepare

pytestmark = pytest.mark.nightly


def _bundle(folder, model_type, dtype):
    checkpoint = make_audio_model(folder / "model", model_type)
    source = open_checkpoint(str(checkpoint), tokenizer=False)
    export_audio(source, folder / "bundle", EncoderOptions(dtype))
    return checkpoint


@pytest.mark.parametrize("model_type", audio.supported())
def test_engines_for_cuda_compute_the_rows_of_transformers(model_type, tmp_path):
    checkpoint = _bundle(tmp_path, model_type, "fp32")
    built = cuda_on_cpu.build_encoder(
        tmp_path / "bundle", tmp_path / "engine", audio_plan(8, 1), "audio"
    )
    network, samples = cuda_on_cpu.open_encoder(tmp_path / "engine", AUDIO_ENGINE), chirp(2.3)
    clip = prepare(samples, built.audio_encoder)
    with cuda_on_cpu.cuda_is_the_cpu():
        rows = network.encode(clip.inputs)[0][: clip.num_tokens]
    np.testing.assert_allclose(rows, AudioReference(checkpoint).rows(samples), atol=2e-4)


@pytest.mark.parametrize("model_type", audio.supported())
def test_engines_for_tensorrt_compile(model_type, tmp_path):
    pytest.importorskip("tensorrt_rtx", reason="pip install '.[tensorrt-rtx]'")
    _bundle(tmp_path, model_type, "fp16")
    plan = audio_plan(20, 1, options=options_of("tensorrt", {"--gpu": "sm89"}))
    built = build_engine(
        "audio", tmp_path / "bundle", tmp_path / "engine", plan, "tensorrt", lambda _: None
    )
    ((graph,),) = built.graphs.values()
    assert (graph.path, built.max_audio_s) == ("audio.engine", 20)
