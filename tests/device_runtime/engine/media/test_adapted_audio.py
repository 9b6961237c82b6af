"""Audio with batches, LoRA adapters and quantized text models, against transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from audio_checkpoints import VOCABULARY, AudioReference, build_bundles, make_audio_model
from lora_adapters import reference, write_adapter
from quantize_cases import decode, load, make_job, write_text
from safetensors.numpy import save_file
from speech_checkpoints import chirp, write_wav

from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.runners.onnxruntime_cpu import ONNXRUNTIME
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.export import audio
from edgellm.quantize.pipeline.run import run_job

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = {"sampling": SamplingParams(temperature=0.0), "max_generate_length": 12}
TEXT_ONLY = "o_proj", "gate_proj", "up_proj", "down_proj"  # names that audio encoders lack
ADAPTER = {"rank": 4, "targets": TEXT_ONLY}  # scale 2
CLIPS = 1.2, 2.63  # seconds
# All inputs of layers are multiples of INT4's blocks
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name == "qwen3_asr" else pytest.mark.nightly)
        for name in audio.supported()
    ],
)
def checkpoint(request, tmp_path_factory):
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp(request.param) / "checkpoint"
    return make_audio_model(folder, request.param, **SIZES)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return [write_wav(folder / f"{seconds}.wav", chirp(seconds)) for seconds in CLIPS]


def _messages(clip):
    items = [{"type": "audio", "audio": str(clip)}, {"type": "text", "text": "w1 w2"}]
    return [{"role": "user", "content": items}]


def _check(llm, answers, cases):
    """Compare greedy ids with those of transformers; `cases`: seconds of the clip, model."""
    for _ in llm.together(answers):
        pass
    for answer, (seconds, model) in zip(answers, cases, strict=True):
        prompt = llm.formatter.format(_messages("a.wav"))
        wanted = model.answer(prompt, [chirp(seconds)], 12)[1]
        assert answer.token_ids == (wanted[: wanted.index(2)] if 2 in wanted else wanted)


def _first(llm, clip, name=None):
    """Log-probabilities of the first token, [V]."""
    sampling = SamplingParams(temperature=0.0, num_logprobs=VOCABULARY)
    answer = llm.generate(_messages(clip), lora=name, sampling=sampling, max_generate_length=1)
    (entry,) = [entry for step in answer for entry in step.logprobs]
    return np.array([value for _, value in sorted(entry.top)])


def test_batches_with_adapters(checkpoint, clips, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", checkpoint, **ADAPTER)
    made = build_bundles(checkpoint, tmp_path, max_batch_size=4, max_lora_rank=4)
    plain, adapted = AudioReference(checkpoint), AudioReference(checkpoint)
    adapted.model = reference(
        checkpoint, adapter, {"": 2.0}, kind="AutoModelForMultimodalLM"
    ).eval()
    cases = [(at, name) for at in (0, 1) for name in (None, "own")]
    models = {None: plain, "own": adapted}
    with LLM(made.engine, audio_engine_dir=made.audio_engine) as llm:
        llm.load_adapter("own", adapter)
        answers = [llm.generate(_messages(clips[at]), lora=name, **GREEDY) for at, name in cases]
        _check(llm, answers, [(CLIPS[at], models[name]) for at, name in cases])
        prompt, rows = llm.formatter.format(_messages(clips[0])), []
        for name, model in models.items():
            rows.append(_first(llm, clips[0], name))
            wanted = model.logprobs(prompt, [chirp(CLIPS[0])])
            np.testing.assert_allclose(rows[-1], wanted, atol=2e-3)
    assert np.abs(rows[0] - rows[1]).max() > 0.1


def test_quantized_text_models(checkpoint, clips, tmp_path):
    text, folder = write_text(tmp_path / "text.jsonl"), tmp_path / "quantized"
    run_job(make_job(checkpoint, text, folder, "int4_awq"), lambda *_: None)
    made = build_bundles(folder, tmp_path, options=CpuOptions(kernels=ONNXRUNTIME))
    decoded = AudioReference(_floats(checkpoint, folder, tmp_path / "floats"))
    with LLM(made.engine, audio_engine_dir=made.audio_engine) as llm:
        answer = llm.generate(_messages(clips[1]), **GREEDY)
        _check(llm, [answer], [(CLIPS[1], decoded)])
        prompt = llm.formatter.format(_messages(clips[1]))
        found, wanted = _first(llm, clips[1]), decoded.logprobs(prompt, [chirp(CLIPS[1])])
    floats = AudioReference(checkpoint).logprobs(prompt, [chirp(CLIPS[1])])
    # ONNX Runtime rounds activations, but by less than the weights were rounded
    assert np.abs(found - wanted).mean() < 0.5 * np.abs(floats - wanted).mean()


def _floats(checkpoint, quantized, folder):
    """The quantized checkpoint in floats, decoded by its documentation."""
    found, tensors = load(quantized), {}
    for name, value in found.items():
        module, _, part = name.rpartition(".")
        if part == "weight" and f"{module}.weight_scale" in found:
            smooth = found.get(f"{module}.pre_quant_scale", np.ones(1, np.float32))
            tensors[name] = decode(found, module) * smooth.astype(np.float32)
        elif part not in ("weight_scale", "pre_quant_scale"):
            tensors[name] = value.astype(np.float32) if value.dtype != np.int64 else value
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for path in checkpoint.iterdir():
        if path.suffix == ".json":
            (folder / path.name).write_text(path.read_text())
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    return folder
