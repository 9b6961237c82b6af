"""`edgellm-quantize draft` of block drafts: calibration, export and decoding."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from block_reference import LAYOUTS, WINDOWED, BlockReference, make_blocks
from eagle_engines import EaglePair, build_blocks, draft_plan
from quantize_cases import decode, load, write_text
from transformers import AutoModelForCausalLM

from edgellm.build.engine import build_engine
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import DRAFT_ENGINE, load_engine
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.networks.block import open_block
from edgellm.device_runtime.networks.draft import DraftPart
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.quantize.calibration.hidden_states import States
from edgellm.quantize.evaluation.layer_errors import compare
from edgellm.quantize.job import Job
from edgellm.quantize.models.block_layer import Places
from edgellm.quantize.pipeline.planning import make_plan
from edgellm.quantize.pipeline.run import run_job

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMES = {
    "dflash": "fp8",
    "jetspec": "nvfp4",
    "deepspec": "int4_awq",
    "speculators": "int8_sq",
    "dflash2": "int4_awq",
    **dict.fromkeys(WINDOWED, "fp8"),
}
ALL = {**LAYOUTS, **WINDOWED}
WORST = {"fp8": 0.03, "int8_sq": 0.02, "int4_awq": 0.14, "nvfp4": 0.11}  # of a matrix
# Relative to the spread of log-probabilities; attention of random weights is sharp.
FAR, INPUTS = {"fp8": 0.2, "int8_sq": 0.03, "int4_awq": 0.6, "nvfp4": 0.8}, 0.04
SIZE, GREEDY = 6, SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> EaglePair:
    folder = tmp_path_factory.mktemp("blocks")
    write_text(folder / "text.jsonl")
    return build_blocks(folder, LAYOUTS["dflash"])


@pytest.fixture(scope="module")
def finished(pair, tmp_path_factory):
    """Return a job and its report by layout; quantized at first use."""
    made = {}

    def get(name: str):
        if name not in made:
            job = _job(pair, name, tmp_path_factory.mktemp(name) / "out")
            made[name] = job, run_job(job, lambda *_: None)
        return made[name]

    return get


def _job(pair: EaglePair, name: str, output: Path, **changes: object) -> Job:
    draft = make_blocks(output.parent / "draft", ALL[name])
    text = str(pair.base_checkpoint.parent / "text.jsonl")
    options = {"num_samples": 6, "seq_len": 40, "held_out": 2, "device": "cpu", **changes}
    base = str(pair.base_checkpoint)
    return Job(
        model_dir=str(draft),
        output_dir=output,
        quantization=SCHEMES[name],
        base_model_dir=base,
        calib_dataset=text,
        **options,
    )


def _reference_outputs(job: Job, name: str, rows: np.ndarray):
    """Return log-probabilities of all predicting positions, and the base's greedy tokens."""
    layout = ALL[name]
    reference = BlockReference(Path(job.base_model_dir), layout)
    for row in torch.from_numpy(rows):
        taps, greedy = _features(job, name, row)
        for first in range(len(row) - SIZE, 0, -SIZE):
            logs = reference.log_probs(reference.predicted(taps[:first], int(row[first]), SIZE))
            yield logs[0 if layout.from_newest else 1 :], reference.targets, greedy[first:]


def _features(job: Job, name: str, row: torch.Tensor):
    """Return the base's hidden states of a text, and its greedy tokens."""
    base = AutoModelForCausalLM.from_pretrained(job.base_model_dir, dtype=torch.float32)
    with torch.no_grad():
        output = base(row[None], output_hidden_states=True)
    taps = [output.hidden_states[tap][0] for tap in ALL[name].taps]
    return torch.cat(taps, -1), output.logits[0].argmax(-1)


@pytest.mark.each_change("dflash", "jetspec", "dflash2", "one_window")
@pytest.mark.parametrize("name", [*LAYOUTS, "causal_window", "one_window"])
def test_the_report_agrees_with_the_reference(finished, name):
    """Perplexity and accepted candidates of the float draft."""
    job, report = finished(name)
    rows = make_plan(job).task.calibration.held_out
    losses, hits = [], []
    for logs, targets, greedy in _reference_outputs(job, name, rows):
        known = {int(target): at for at, target in enumerate(targets)}
        for row, token in zip(logs, greedy, strict=False):
            right = known.get(int(token), -1)
            losses += [-float(row[right])] if right >= 0 else []
            hits.append(int(row.argmax()) == right)
    quality = report.quality
    assert quality.tokens == len(hits) == 2 * 6 * (5 + ALL[name].from_newest)
    assert quality.perplexity_float == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert quality.accuracy_float == pytest.approx(np.mean(hits), abs=0.011)  # near-ties
    assert 0 < quality.kl_divergence < FAR[SCHEMES[name]]
    assert quality.perplexity_quantized != quality.perplexity_float


@pytest.mark.each_change("jetspec", "dflash2")
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_engine_computes_with_the_quantized_weights(finished, pair, name, tmp_path):
    """With held-out text; tensors outside the layers are unchanged."""
    job, report = finished(name)
    layout = LAYOUTS[name]
    found, source = load(job.output_dir), load(Path(job.model_dir))
    for key, value in source.items():
        if not _is_rounded(key) and "layernorm" not in key:
            np.testing.assert_array_equal(found[key], value)
    assert report.quantized_modules == 7 * layout.layers
    for part in ("self_attn.q_proj", "self_attn.k_proj"):  # with unfolded smoothing
        wanted = source[f"layers.1.{part}.weight"]
        weight = _decoded(found)[f"layers.1.{part}.weight"].numpy()
        assert np.linalg.norm(weight - wanted) < WORST[SCHEMES[name]] * np.linalg.norm(wanted)
    row = torch.from_numpy(make_plan(job).task.calibration.held_out[0])
    taps = _features(job, name, row)[0][:9]
    reference = BlockReference(pair.base_checkpoint, layout)
    floats = reference.log_probs(reference.predicted(taps, int(row[9]), SIZE))
    reference.tensors |= _decoded(found)
    rounded = reference.log_probs(reference.predicted(taps, int(row[9]), SIZE))
    engine = _built(job, pair, tmp_path)
    session = open_block(engine / "draft", load_engine(engine / "draft", DRAFT_ENGINE))
    ids, block = row[1:10].numpy(), np.arange(9, 9 + SIZE)
    part = DraftPart(
        kv=session.kv,
        token_ids=ids,
        write_index=0,
        output_rows=block,
        top_k=layout.draft_vocab,
        taps=taps.numpy(),
    )
    (result,) = session.run_batch([part])
    places = np.searchsorted(reference.targets.numpy(), result.token_ids)
    spread = np.linalg.norm(floats - floats.mean(1, keepdims=True))
    for expected, maximum in ((floats, FAR[SCHEMES[name]]), (rounded, INPUTS)):
        off = result.log_probs - np.take_along_axis(expected.numpy(), places, 1)
        assert np.linalg.norm(off) < maximum * spread
    _assert_lossless(engine)


def _is_rounded(name: str) -> bool:
    return name.startswith("layers.") and name.endswith("_proj.weight")


def _decoded(tensors: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Dequantize layers, with smoothing folded into the weights."""
    found = {}
    for name, value in tensors.items():
        layer = name.removesuffix(".weight")
        if _is_rounded(name):
            smooth = tensors.get(f"{layer}.pre_quant_scale", np.ones(1)).astype(np.float32)
            found[name] = torch.from_numpy(decode(tensors, layer) * smooth)
        elif "layernorm" in name:
            found[name] = torch.from_numpy(value.astype(np.float32))
    return found


def _built(job: Job, pair: EaglePair, folder: Path) -> Path:
    """Build the base's engine with the quantized draft."""
    checkpoints = (open_checkpoint(str(job.output_dir), tokenizer=False),
                   open_checkpoint(job.base_model_dir, tokenizer=False))  # fmt: skip
    export_draft(*checkpoints, folder / "bundle", DraftOptions("fp32"))
    shutil.copytree(pair.engine, folder / "engine", ignore=shutil.ignore_patterns("draft"))
    build_engine(
        "draft", folder / "bundle", folder / "engine", draft_plan(), "onnxruntime", lambda _: None
    )
    return folder / "engine"


def _assert_lossless(engine: Path) -> None:
    spec = SpecOptions(tree="fixed", top_k=3, verify_size=12)
    llm = LLM(engine, spec=spec)
    plain, found = (
        llm.generate("w20 w21", sampling=GREEDY, max_generate_length=30, speculative=drafts)
        for drafts in (False, True)
    )
    list(plain), list(found)
    assert found.token_ids == plain.token_ids
    assert max(counts.tree_size for counts in found.profile.rounds) > 2


def test_block_places_follow_from_the_number_of_tokens_or_rows():
    """The number of states decides; ModelOpt's own forward passes have one block."""
    for tokens in range(7, 30):
        places = Places.of_text(tokens, SIZE)
        assert Places.of_rows(tokens + places.count * SIZE, SIZE) == places
        assert places.tokens[-1] == tokens - 1
        assert places.firsts[0] in range(1, SIZE + 1)
    places = Places(3, 1, 2)
    assert places.attention_mask(is_causal=True)[3:].astype(int).tolist() == [
        [1, 0, 0, 1, 0],
        [1, 0, 0, 1, 1],
    ]
    assert places.attention_mask(is_causal=False)[3:, 3:].all()
    assert Places.of_rows(2, SIZE) == Places(0, 1, 2)


def test_unchanged_positions_do_not_reduce_errors(tmp_path):
    rows = [torch.ones(1, 3, 4) * torch.tensor([1, 1, last])[:, None] for last in (1, 3, 4)]
    names = ("before", "floats", "rounded")
    entering, *after = (States(tmp_path / name, (1, 3, 4), 1) for name in names)
    for states, values in zip((entering, *after), rows, strict=True):
        states.write(iter([values]))
    errors = compare(lambda _: rows[2], entering, tuple(after), torch.device("cpu"), 4)
    assert errors == pytest.approx((1 / 2, 1 / 3))


def test_a_text_shorter_than_a_block_is_rejected(pair, tmp_path):
    job = _job(pair, "dflash", tmp_path / "out", seq_len=6)
    with pytest.raises(EdgeLLMError, match="--seq_len 6: the draft's blocks have 6 tokens"):
        run_job(job, lambda *_: None)
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
