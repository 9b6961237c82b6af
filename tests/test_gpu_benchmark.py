"""`benchmarks/gpu.py` without a GPU: the oracle, the clocks and the report."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import gpu
import numpy as np
import pytest
from eagle_engines import BASE_PLAN
from fake_cuda import FakeDriver, fake_graphs
from fake_gpu import FakeDevice
from harness.gpu.clock import (
    COMPACTION,
    COPIES,
    PASSES,
    CudaEvents,
    TimedDevice,
    peak_bandwidth,
    timed_engines,
)
from harness.gpu.oracle import predicting
from harness.gpu.rounds import GOALS, CountedDevice, steps_of
from harness.gpu.timed_runs import Run, check_oracle, run
from lowered_engines import Lowered

from edgellm.build.resource_estimate import predict
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import LLM_BUNDLE, LLM_ENGINE, load_bundle, load_engine
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions, runners
from edgellm.device_runtime.gpu import compute_capability
from edgellm.device_runtime.kernels.triton.catalog import keep_rows
from edgellm.device_runtime.networks.sequence_kv import SequenceKV
from edgellm.device_runtime.runners import onnxruntime_cpu
from edgellm.device_runtime.runners.tensorrt.cuda import driver as cuda
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import Planes

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = "w83 w64 w53 w32 w35 w12 w15"  # its output is long
GREEDY = SamplingParams(temperature=0.0)
TOKENS, STEPS, NODES = 61, 3, 12
SIZES = {"top_k": 4, "steps": STEPS, "verify_size": NODES, "tree": "fixed"}


def _answer(llm: LLM, *, speculative: bool):
    answer = llm.generate(
        PROMPT, sampling=GREEDY, max_generate_length=TOKENS, speculative=speculative
    )
    rounds = [step.round for step in answer]
    return answer, rounds


@pytest.mark.parametrize("wanted", [1.0, 1.4, 2.5, 3.0, 4.0])
@pytest.mark.parametrize("draft", ["eagle3", "medusa"])
def test_the_oracle_has_the_requested_acceptance_rate(eagle_pairs, monkeypatch, draft, wanted):
    with timed_engines(onnxruntime_cpu) as clocks:
        llm = LLM(eagle_pairs(draft).engine, spec=SpecOptions(**SIZES))
    plain, _ = _answer(llm, speculative=False)
    assert len(plain.token_ids) == TOKENS
    moved = []
    compact = SequenceKV.compact
    monkeypatch.setattr(
        SequenceKV,
        "compact",
        lambda self, length, rows: (moved.append(rows.tolist()), compact(self, length, rows)),
    )
    clocks.reset()
    before, text = llm._drafters, [*plain.prompt.token_ids, *plain.token_ids]
    with predicting(llm, text, wanted):
        found, rounds = _answer(llm, speculative=True)
    assert llm._drafters is before
    assert found.token_ids == plain.token_ids
    drafted = rounds[1:-1]  # the last may be cut by the output's end
    length = np.mean([len(each.token_ids) for each in drafted])
    assert abs(length - wanted) <= 1 / len(drafted)
    assert {len(each.tree) for each in drafted[:-2]} == {NODES}
    assert clocks.passes_ms(1) > 0
    paths = [path for path in moved if len(path) > 1]
    assert bool(paths) == (wanted > 1)
    assert all(path != list(range(len(path))) for path in paths)  # rows that must move


def test_an_oracle_with_another_output_is_rejected(eagle_pair):
    """Control: the base decides which tokens are right."""
    llm = LLM(eagle_pair.engine, spec=SpecOptions(**SIZES))
    plain, _ = _answer(llm, speculative=False)
    wrong = [*plain.prompt.token_ids, *((token + 1) % 96 for token in plain.token_ids)]
    with predicting(llm, wrong, 4.0):
        found, rounds = _answer(llm, speculative=True)
    assert found.token_ids == plain.token_ids
    assert np.mean([len(each.token_ids) for each in rounds[1:]]) < 2


class HostEvents:
    """Events of the fake GPU, with the time when its stream reached them."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def record(self, event):
        event = [] if event is None else event
        event.clear()
        self._device._ask(lambda: event.append(time.perf_counter()))
        return event

    def between_ms(self, first, last) -> float:
        return (last[0] - first[0]) * 1e3


@pytest.mark.each_change("eagle3")
@pytest.mark.parametrize("draft", ["eagle3", "medusa"])
def test_a_round_on_the_fake_gpu(eagle_pairs, tmp_path, monkeypatch, draft):
    """Base, draft, compaction and check have times below the round's."""
    pair = eagle_pairs(draft)
    lowered, gpus = Lowered(pair, tmp_path), [FakeDevice(), FakeDevice()]
    devices = [TimedDevice(device, HostEvents(device)) for device in gpus]
    lowered.replace_engines(monkeypatch, *devices)
    with timed_engines(onnxruntime_cpu) as clocks:
        llm = LLM(pair.engine, spec=SpecOptions(**SIZES))
    clocks.devices += devices
    plain = run(llm, clocks, TOKENS, speculative=False, prompt=PROMPT, repeats=1)
    assert set(plain.kernels_ms) == {"base", "draft", COMPACTION}
    assert 0 < plain.kernels_ms["base"] <= plain.base_ms < plain.wall_ms
    assert plain.kernels_ms["draft"] == plain.kernels_ms[COMPACTION] == 0
    text = [*plain.prompt_ids, *plain.token_ids]
    with predicting(llm, text, 2.5):
        found = run(llm, clocks, TOKENS, speculative=True, prompt=PROMPT, repeats=1)
    assert found.token_ids == plain.token_ids
    assert 0 < found.kernels_ms["draft"] <= found.draft_ms
    assert found.kernels_ms[COMPACTION] > 0
    assert 0 < found.outside < 1
    assert found.base_ms + found.draft_ms < found.wall_ms
    (check,) = check_oracle(llm, clocks, plain, [3.0], prompt=PROMPT, repeats=1)
    assert check.is_plain
    assert abs(check.acceptance_length - 3) < 0.3
    assert check.expected == check.acceptance_length / (1 + check.draft)
    assert check.draft > 0
    assert check.verification > 0
    assert gpus[0].launches > TOKENS > gpus[0].captures


@pytest.mark.each_change("True")
@pytest.mark.parametrize("speculative", [False, True])
def test_output_tokens_are_counted(eagle_pair, tmp_path, monkeypatch, speculative):
    """By the fake GPU's counts; a round runs on the device without clocks in between."""
    fake, lowered = FakeDevice(), Lowered(eagle_pair, tmp_path)
    device = CountedDevice(fake, CountingEvents())
    lowered.replace_engines(monkeypatch, device)
    llm = LLM(eagle_pair.engine, spec=SpecOptions(**SIZES))
    names = {
        "waits": "waits",
        "bytes_up": "bytes_up",
        "bytes_down": "bytes_down",
        "graphs": "launches",
        "captures": "captures",
    }
    device.synchronize()  # work from loading the engines
    before = {name: getattr(fake, name) - device.counts[own] for own, name in names.items()}
    steps = steps_of(llm, device, PROMPT, 40, speculative=speculative)
    device.synchronize()  # work that was not waited for
    after = {name: getattr(fake, name) - device.counts[own] for own, name in names.items()}
    assert before == after
    maximum = steps.largest
    assert (maximum["waits"], maximum["captures"], maximum["allocations"]) == (1, 0, 0)
    assert 0 < maximum["bytes_down"] <= GOALS["drafted" if speculative else "plain"][1]
    page = (Path(__file__).parents[1] / "docs" / "gpu-proof.md").read_text("utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith("| bytes back |"))
    told = row.split("|")[2 + speculative].strip().replace(",", "")
    assert maximum["bytes_down"] == int(told)  # of a round of 12 nodes
    assert maximum["graphs"] == 1 if not speculative else maximum["graphs"] > 1
    assert steps.gpu_ms > 0
    assert steps.tokens < len(steps.token_ids) == 40
    assert "1 waits (goal 1)" in steps.line("drafted" if speculative else "plain")


class CountingEvents:
    """Marks are their own numbers."""

    def __init__(self) -> None:
        self.made = itertools.count()

    def record(self, event):
        del event
        return next(self.made)

    def between_ms(self, first, last) -> float:
        return last - first


def test_events_are_asked_for_in_the_gpus_context():
    driver = FakeDriver()
    device = cuda.CudaDevice(driver, fake_graphs(driver), driver.Device(0))
    events = CudaEvents(device)
    first, last = events.record(None), events.record(None)
    assert events.record(first) is first
    assert events.between_ms(first, last) == 2.5
    assert [name for name, _ in driver.calls].count("mark in 7") == 3
    assert not driver.stack


def test_calls_on_a_stream_are_distinguished():
    fake = FakeDevice()
    device = TimedDevice(fake, events := CountingEvents())
    memory, host = device.allocate(1024), device.pinned(32)
    host[:] = 0

    def enqueue():
        device.upload(memory.address, host)
        device.download(host, memory.address)

    enqueue()  # a pass
    replay = device.capture(enqueue)
    assert next(events.made) == 2  # none is in the graph
    replay()
    device.download(host, memory.address)
    device.upload(memory.address, host)
    device.move_rows(
        Planes(address=memory.address, count=1, rows=8, row_bytes=16), memory.address, 1, 0
    )
    kept = [*[memory.address] * 4, 64]  # an invalid table
    device.launch(keep_rows(64, "fp16"), (1, 1, 2), kept)
    device.upload(memory.address, host)  # which is not followed
    assert not device.spent_ms
    device.synchronize()
    assert device.spent_ms == {PASSES: 2, COPIES: 1, COMPACTION: 2}
    assert device.stream == fake.stream


def test_the_report(eagle_pair, tmp_path, monkeypatch, capsys):
    """As on a machine with a GPU, except for events."""
    monkeypatch.setattr(gpu, "compute_capability", lambda: 89)
    monkeypatch.setattr(gpu, "measured_bandwidths", lambda: {"attributes": 20.0, "copy": 10.0})
    written = tmp_path / "figures.json"
    flags = [
        "--tokens",
        TOKENS,
        "--prompt",
        PROMPT,
        "--repeats",
        1,
        "--steps",
        STEPS,
        "--nodes",
        NODES,
        "--json",
        written,
    ]
    monkeypatch.setattr(sys, "argv", ["gpu.py", "decode", *map(str, (eagle_pair.engine, *flags))])
    gpu.main()
    figures, shown = json.loads(written.read_text()), capsys.readouterr().out
    assert [each["wanted"] for each in figures["oracle"]] == [1.0, 1.5, 2.0, 3.0, 4.0]
    assert all(each["is_plain"] for each in figures["oracle"])
    assert figures["drafted"]["is_plain"]
    for name in ("plain", "drafted"):
        assert figures[name]["cpu_ms_per_step"] > 0
        assert figures[name]["kernels_ms"] == {}
    assert {"date", "onnxruntime", "python"} <= set(figures["machine"])
    milliseconds = figures["bytes_per_token"] / 20e6  # of the larger bandwidth
    assert figures["roofline"] == pytest.approx(
        milliseconds * figures["plain"]["tokens_per_s"] / 1e3
    )
    for part in ("tokens/s", "CPU ms/step", "roofline", "no goal below 1 GB", "outside", "oracle"):
        assert part in shown


def test_an_engine_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "compute_capability", lambda: 89)
    flags = (tmp_path / "none", "--bandwidth", 10)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "decode", *map(str, flags)])
    with pytest.raises(SystemExit, match="error: no such folder") as caught:
        gpu.main()
    assert "hint: " in str(caught.value)


def test_bytes_read_for_a_token(eagle_pair):
    manifest = load_engine(eagle_pair.engine, LLM_ENGINE)
    read, how = gpu.bytes_per_token(eagle_pair.engine, manifest, 10)
    kv = 10 * manifest.decoder.kv.bytes_per_token
    assert how == "weights of the bundle"
    bundle = load_bundle(eagle_pair.bundle, LLM_BUNDLE)
    predicted = predict(eagle_pair.bundle, bundle, BASE_PLAN, "onnxruntime", eagle_pair.engine)
    assert read - kv == predicted.estimate.decode_bytes
    manifest.provenance["bundle"] = "/nowhere"
    least, how = gpu.bytes_per_token(eagle_pair.engine, manifest, 10)
    graph = (eagle_pair.engine / manifest.main_graphs[0].path).stat().st_size
    assert least == graph - 2 * 96 * 96 + kv
    assert "at least" in how


def test_verdicts_and_rates():
    assert peak_bandwidth(10_501_000, 384) == pytest.approx(1008.1, abs=0.1)  # of an RTX 4090
    found = Run((), (), 40, 10, 100.0, 20.0, 70.0, 20.0, {"base": 60.0, "draft": 15.0})
    assert found.token_ms == 2.5
    assert found.outside == pytest.approx(0.25)
    assert found.as_json()["cpu_ms_per_step"] == 2.0


def test_an_output_that_ends_at_once(eagle_pair):
    with timed_engines(runners.find("onnxruntime")) as clocks:
        llm = LLM(eagle_pair.engine)
    with pytest.raises(EdgeLLMError, match="the answer has 2 tokens"):
        run(llm, clocks, 2, speculative=False, prompt=PROMPT)


@pytest.mark.skipif(compute_capability() is not None, reason="there is a GPU here")
def test_a_missing_gpu_is_reported(tmp_path):
    script = Path(gpu.__file__)
    result = subprocess.run(
        [sys.executable, script, "decode", tmp_path], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, "skipped: there is no NVIDIA GPU here\n")
