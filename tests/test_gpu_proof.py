"""The stages of `benchmarks/gpu_proof.py`, on fakes; their measurements are tested elsewhere."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import fake_gpu
import gpu
import gpu_proof
import kernel_references
import pytest
from fake_gpu import FakeDevice
from harness.gpu import attention, experts, kernels, recurrent, vocabulary
from harness.gpu.kernels import check_kernels

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.kernels.triton.catalog import KERNELS

ROUNDS = "grow_level", "select_tree", "lay_out", "accept_greedy", "accept_sampled"


def test_the_kernels_of_a_round_are_checked_on_the_fake_gpu(monkeypatch):
    found = check_kernels(FakeDevice(), 5000)
    of_rounds = {f"{name}{of}_us" for name in ROUNDS for of in ("", "_of_2", "_of_4")}
    of_rows = {"pick_shares_us", "join_picks_us", "pick_shares_gb_per_s"}
    assert found.keys() == of_rounds | of_rows

    def broken(*_, **__) -> None:
        """Leave everything as it was."""

    monkeypatch.setitem(fake_gpu.REFERENCES, "lay_out", broken)
    monkeypatch.setattr(kernels, "REFERENCES", kernel_references.REFERENCES.copy())
    kernels.REFERENCES["lay_out"] = kernel_references.lay_out
    with pytest.raises(AssertionError, match="lay_out"):
        check_kernels(FakeDevice(), 5000)


@pytest.mark.parametrize("name", ROUNDS)
def test_a_kernel_that_serves_one_sequence_alone_is_found(monkeypatch, name):
    reference = kernel_references.REFERENCES[name]

    def of_one(*arguments, constants) -> None:
        if constants["grid"] == (1, 1, 1):
            reference(*arguments, constants=constants)

    monkeypatch.setattr(fake_gpu, "REFERENCES", {**fake_gpu.REFERENCES, name: of_one})
    with pytest.raises(AssertionError, match=name):
        check_kernels(FakeDevice(), 5000)


@pytest.mark.nightly
def test_requested_kernels_are_supported(monkeypatch):
    """In Triton's interpreter they pass."""
    import interpreted  # skips the test where there is no Triton

    def interpret(name):
        folder = "edgellm.device_runtime.kernels.triton"
        kernel = getattr(import_module(f"{folder}.{KERNELS[name].module}"), name)

        def launch(*given, constants) -> None:
            own = {key: each for key, each in constants.items() if key not in ("grid", "memory")}
            interpreted.launch(kernel, constants["grid"], *given, **own)

        return launch

    runs = {name: interpret(name) for name in ROUNDS}
    monkeypatch.setattr(fake_gpu, "REFERENCES", {**fake_gpu.REFERENCES, **runs})
    check_kernels(FakeDevice(), 300)


def test_attention_is_checked_on_the_fake_gpu(monkeypatch):
    sizes = attention.Sizes.small()
    found = attention.check_attention(FakeDevice(), 87, sizes)
    names = ("store_rows", "attend", "finish", "keep_rows")
    cases = [f"{codes}_{rows}" for codes in ("fp16", "int8") for rows in (1, 8, 60, 128)]
    expected = {f"{name}_{case}_us" for name in names for case in cases}
    reads = {case: "finish" if case.endswith("_128") else "attend" for case in cases}
    assert found.keys() == expected | {f"{name}_{case}_gb_per_s" for case, name in reads.items()}

    def nothing(*_, **__) -> None:
        """Leave everything as it was."""

    for broken in ("store_rows", "attend", "finish", "keep_rows"):
        with monkeypatch.context() as patch:
            patch.setattr(fake_gpu, "REFERENCES", {**fake_gpu.REFERENCES, broken: nothing})
            with pytest.raises(AssertionError, match=r"turned|y, |codes"):
                attention.check_attention(FakeDevice(), 87, sizes)


def test_recurrent_layers_are_checked_on_the_fake_gpu(monkeypatch):
    sizes = recurrent.Sizes.small()
    found = recurrent.check_recurrent(FakeDevice(), sizes)
    names = "convolve_rows", "delta_rows", "decaying_rows", "advance_window", "advance_state"
    expected = {f"{name}_{rows}_us" for name in names for rows in sizes.rows}
    assert found.keys() == expected | {"delta_rows_1_gb_per_s"}

    def nothing(*_, **__) -> None:
        """Leave everything as it was."""

    for broken in ("convolve_rows", "delta_rows", "advance_window", "advance_state"):
        with monkeypatch.context() as patch:
            patch.setattr(fake_gpu, "REFERENCES", {**fake_gpu.REFERENCES, broken: nothing})
            with pytest.raises(AssertionError, match="rows: "):
                recurrent.check_recurrent(FakeDevice(), sizes)


def test_experts_are_checked_on_the_fake_gpu(monkeypatch):
    sizes = experts.Sizes.small()
    found = experts.check_experts(FakeDevice(), sizes)
    names = "route_rows", "group_rows", "expert_gates", "expert_downs", "sum_experts"
    cases = [f"{codes}_{rows}" for codes in ("fp16", "int4", "fp4") for rows in sizes.rows]
    assert {f"{name}_{case}_us" for name in names for case in cases} < found.keys()
    for broken in names:
        with monkeypatch.context() as patch:
            patch.setattr(
                fake_gpu, "REFERENCES", {**fake_gpu.REFERENCES, broken: lambda *_, **__: None}
            )
            with pytest.raises(AssertionError, match="rows: "):
                experts.check_experts(FakeDevice(), sizes)


def test_embeddings_and_heads_are_checked_on_the_fake_gpu(monkeypatch):
    sizes = vocabulary.Sizes.small()
    found = vocabulary.check_vocabulary(FakeDevice(), sizes)
    assert found["head_rows_int4_20_gb_per_s"] > 0
    for broken in ("look_up_rows", "head_rows"):
        with monkeypatch.context() as patch:
            patch.setattr(
                fake_gpu, "REFERENCES", {**fake_gpu.REFERENCES, broken: lambda *_, **__: None}
            )
            with pytest.raises(AssertionError, match="rows: "):
                vocabulary.check_vocabulary(FakeDevice(), sizes)


def test_the_runtime_is_checked_on_the_fake_gpu():
    assert gpu_proof.check_runtime(FakeDevice(), (64, 64))["gather_gb_per_s"] > 0


@pytest.mark.parametrize("broken", ["gather_rows", "append_rows", "move_rows"])
def test_a_kernel_that_does_nothing_is_found(monkeypatch, broken):
    monkeypatch.setattr(FakeDevice, broken, lambda *_: None)
    with pytest.raises(AssertionError, match=broken):
        gpu_proof.check_runtime(FakeDevice(), (64, 64))


def _prove(monkeypatch, folder, *, says: dict[str, bool], dry: bool = True):
    """Stages and exit status; `says`: whether programs pass, by a word of their command."""
    asked = []

    def command(*words, codes=(0,)):
        del codes
        asked.append(" ".join(map(str, words)))
        passed = not any(word in asked[-1] and not good for word, good in says.items())
        return passed, '{"gather_gb_per_s": 1.0, "is_plain": true}'

    monkeypatch.setattr(gpu_proof, "command", command)
    flags = ["--output", folder, *(["--dry"] if dry else [])]
    monkeypatch.setattr(sys, "argv", ["gpu_proof.py", *map(str, flags)])
    with pytest.raises(SystemExit) as caught:
        gpu_proof.main()
    found = json.loads((folder / "gpu-proof.json").read_text())
    return {each["name"]: each for each in found["stages"]}, caught.value.code, asked


def test_all_stages_of_the_proof(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_proof, "_TESTS_NEED", ())
    runs = {"plain": {"tokens_per_s": 50.0}, "drafted": {"tokens_per_s": 9.0, "is_plain": True}}
    monkeypatch.setattr(
        gpu,
        "measure",
        lambda engine, _: {"engine": engine.name, "roofline": 0.5, **runs, **counted},
    )
    maximum = {"waits": 1, "bytes_down": 12, "bytes_up": 9, "graphs": 1, "kernels": 0}
    as_used = {"plain": {"tokens_per_s": 60.0, "largest": maximum}, "is_plain": True}
    counted = {"production": as_used, "launches": {"llm": {"decode": 37}}}
    stages, status, asked = _prove(monkeypatch, tmp_path / "new" / "proof", says={})
    assert list(stages) == ["doctor", "tests", "runtime", "engine", "rounds", "decoding"]
    assert status == 0
    assert stages["runtime"]["figures"]["gather_gb_per_s"] == 1.0
    assert stages["decoding"]["figures"]["engine"] == "engine"
    found = stages["decoding"]["found"]
    assert "plain: 50.0 tokens/s\ndrafted: 9.0" in found
    assert "as users get it, plain: 60.0 tokens/s; a step has at most 1 waits, 12 bytes" in found
    assert "kernels of a pass of llm: decode 37" in found
    assert sum("--backend onnxruntime" in each for each in asked) == 2  # dry: for the CPU
    page = (tmp_path / "new" / "proof" / "gpu-proof.md").read_text()
    assert page.startswith("# A dry run: nothing ran on a GPU")
    assert "| decoding | ok |" in page
    assert "ok      decoding" in capsys.readouterr().out


def test_the_proof_goes_on_where_a_stage_fails(tmp_path, monkeypatch):
    def fails(*_):
        raise EdgeLLMError("the answer has 1 tokens")

    monkeypatch.setattr(gpu, "measure", fails)
    stages, status, _ = _prove(monkeypatch, tmp_path, says={"pytest": False})
    assert status == 1
    assert [name for name, each in stages.items() if not each["passed"]] == ["tests", "decoding"]
    assert stages["decoding"]["found"] == "EdgeLLMError: the answer has 1 tokens"


def test_the_report_is_written_where_the_gpu_cannot_be_opened(tmp_path, monkeypatch):
    """Without pycuda, or with a driver that fails for this user."""

    def fails(*_):
        raise EdgeLLMError("pycuda is not usable here")

    monkeypatch.setattr(gpu_proof, "compute_capability", fails)
    monkeypatch.setattr(gpu_proof, "measured_bandwidths", fails)
    stages, status, _ = _prove(monkeypatch, tmp_path, says={}, dry=False)
    assert status == 1
    assert stages["decoding"]["found"] == "EdgeLLMError: pycuda is not usable here"
    assert stages["runtime"]["passed"]


def test_without_an_engine_nothing_is_decoded(tmp_path, monkeypatch):
    stages, status, _ = _prove(monkeypatch, tmp_path, says={"build.cli": False})
    assert (status, stages["engine"]["passed"], "decoding" in stages) == (1, False, False)


def test_flags_without_effect(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "give one of decode, clock" in capsys.readouterr().err


def test_missing_packages_of_the_tests_are_named(monkeypatch):
    """With torch for CPUs: PyPI's brings gigabytes of CUDA packages on a board."""
    monkeypatch.setattr(gpu_proof, "_TESTS_NEED", ("pytest", "no_such_package"))
    passed, said, _ = gpu_proof._tests(dry=False)
    missing, _, remedy = said.partition("; ")
    assert (passed, missing) == (False, "missing: no_such_package")
    assert "whl/cpu" in remedy
    page = Path(__file__).parents[1] / "docs" / "gpu-proof.md"
    assert remedy in page.read_text("utf-8")


@pytest.mark.parametrize(("said", "passes"), [("3 passed, 2 skipped", True), ("9 skipped", False)])
def test_tests_that_all_skip_show_nothing(monkeypatch, said, passes):
    monkeypatch.setattr(gpu_proof, "_TESTS_NEED", ())
    monkeypatch.setattr(gpu_proof, "command", lambda *_: (True, f"== {said} in 1.00s =="))
    passed, _, counts = gpu_proof._tests(dry=False)
    assert (passed, "skipped" in counts) == (passes, True)
