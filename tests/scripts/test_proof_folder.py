"""The folder that carries the proof on a GPU; its programs run on the CPU and on the fake GPU."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from made_once import made_once

from edgellm.build.verify.check import row_errors
from edgellm.core.errors import EdgeLLMError
from edgellm.scripts.proof_folder import cli, prove, wheels
from edgellm.scripts.proof_folder.bundles import make_bundle
from edgellm.scripts.proof_folder.checkpoints import MODELS
from edgellm.scripts.proof_folder.steps import dry, memory, outputs

# What no step may reach: names of an index cannot be resolved, and proxies do not answer.
OFFLINE = {"PIP_NO_INDEX": "1", "https_proxy": "http://127.0.0.1:9", "PIP_RETRIES": "0"}
FP16, FP16_CUDA = "fp16, TensorRT", "fp16, ONNX Runtime on CUDA"


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A folder without wheels, with one precision."""

    def make(to: Path) -> Path:
        cli.make_folder(to, (), ("fp16",))
        return to

    return made_once(tmp_path_factory, "proof-folder", make)


@pytest.fixture
def folder(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "proof"))


def keep(folder, *names):
    """Leave these steps alone in the folder's list."""
    path = folder / "contents.json"
    contents = json.loads(path.read_text())
    contents["steps"] = [each for each in contents["steps"] if each["name"] in names]
    assert len(contents["steps"]) == len(names)
    path.write_text(json.dumps(contents))


def run(folder, *flags, python=sys.executable):
    words = [folder / "prove", "--dry", *(("--python", python) if python else ()), *flags]
    result = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, **OFFLINE, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, result.stdout, result.stderr


def results(folder):
    found = json.loads((folder / "results" / "proof.json").read_text())
    return {each["step"]: each for each in found["steps"]}


def test_the_folder_proves_itself_on_the_cpu(folder):
    keep(folder, FP16, FP16_CUDA)
    code, said, errors = run(folder)
    assert code == 0, said + errors
    found = results(folder)
    for name in (FP16, FP16_CUDA):
        rows = found[name]["outputs"]
        assert {name.partition(",")[0] for name in rows} == {
            "logits of the prompt",
            "logits of a token",
            "logits of a tree",
            "logits of the next token",
            "K/V of layer 0",
            "K/V of layer 1",
        }
        assert all(0 < one["error"] <= one["allowed"] < 0.01 for one in rows.values())
    page = (folder / "results" / "proof.md").read_text()
    assert page.startswith("# A dry run: nothing ran on a GPU")
    lines = [line for line in page.splitlines() if line.startswith(f"| {FP16} | ")]
    assert [line.split(" | ")[1].partition(" of ")[0] for line in lines[1:]] == ["logits", "K/V"]


def test_torch_stands_in_for_tensorrt(folder):
    """Its engines on the fake GPU, whose graphs are counted."""
    keep(folder, FP16, FP16_CUDA)
    code, said, errors = run(folder, "--stand_in")
    assert code == 0, said + errors
    found = results(folder)
    assert re.fullmatch(r"CUDA graphs: 1 recorded, \d launched, 0 refused", found[FP16]["said"][-1])
    assert found[FP16]["outputs"]["missing CUDA graphs"]["error"] == 0
    assert "said" not in found[FP16_CUDA]
    rows = [one for one in found[FP16]["outputs"].values() if one["allowed"]]
    assert len(rows) == 6
    assert all(0 < one["error"] <= one["allowed"] < 0.01 for one in rows)
    page = (folder / "results" / "proof.md").read_text()
    assert "; torch computed the engines of TensorRT" in page.splitlines()[0]


def test_refused_graphs_fail():
    said = ["a line", "CUDA graphs: 3 recorded, 9 launched, 1 refused"]
    assert not outputs.passed(dry.missing_graphs(said))
    assert not outputs.passed(
        dry.missing_graphs(["CUDA graphs: 0 recorded, 0 launched, 0 refused"])
    )
    assert outputs.passed(dry.missing_graphs(["CUDA graphs: 2 recorded, 4 launched, 0 refused"]))
    assert dry.missing_graphs(said[:1]) == {}


def test_the_page_shows_the_worst_outputs_and_all_wrong_ones():
    def one(error, allowed):
        return {"error": error, "allowed": allowed}

    found = prove._shown(
        {
            "logits of a": one(0.1, 1.0),
            "logits of b": one(0.2, 1.0),
            "K/V of 0": one(1.1, 1.0),
            "K/V of 1": one(1.2, 1.0),
            "tokens": one(1.0, 0.0),
            "time": one(9.0, None),
        }
    )
    assert [name for name, _ in found] == ["logits of b", "K/V of 0", "K/V of 1", "tokens", "time"]


def test_other_numbers_fail(made, tmp_path):
    arrays = dict(np.load(made / "expected" / "fp16.npz"))
    name = "K/V of layer 1, sequence 0"
    arrays[name][1, 0, 3] *= 1.01
    np.savez(tmp_path / "other.npz", **arrays)
    bundle = made / "bundles" / "fp16"

    def compare():
        given = {"sequences": 1, "adapter": None}
        return outputs.compare_outputs(bundle, tmp_path / "other.npz", "onnxruntime_cpu", **given)

    passed, found = compare()
    rows = found["outputs"]
    wrong = [key for key, one in rows.items() if one["error"] > one["allowed"]]
    assert (passed, wrong) == (False, [name])
    del arrays[name]
    np.savez(tmp_path / "other.npz", **arrays)
    assert compare() == (False, {"said": [f"outputs differ: {[name]}"]})


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("precision", "largest"),
    [("nvfp4", 0.5), ("int8", 0.15), ("fp8", 0.15), ("int4-32", 0.4), ("int4-128", 0.5)],
)
def test_quantized_bundles_compute_what_float_ones_do(precision, largest, made, tmp_path):
    """Their layouts are read as they are written; unrelated outputs differ by 1.4."""
    make_bundle(tmp_path / "bundle", tmp_path / "some.npz", precision, cli._MODEL)
    found, expected = np.load(tmp_path / "some.npz"), np.load(made / "expected" / "fp16.npz")
    name = "logits of a tree, sequence 1"
    assert 0.001 < row_errors(found[name], expected[name]) < largest


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [(), ("--stand_in",)])
def test_all_steps_of_a_dry_run(flags, tmp_path, capsys):
    folder = tmp_path / "proof"
    cli.proof_folder(folder, no_wheels=True)
    assert f"{folder}: " in capsys.readouterr().out
    code, said, errors = run(folder, "--minutes", "60", *flags)
    assert code == 0, said + errors
    found = results(folder)
    assert {each["status"] for each in found.values()} == {"ok"}
    assert {f"{name}, TensorRT" for name in MODELS} <= found.keys()
    assert {each["step"] for each in found.values() if "outputs" not in each} == {
        "machine",
        "runtime and kernels",
    }
    assert found["runtime and kernels"]["figures"]["gather_gb_per_s"] > 0
    assert found["speed of 1B, TensorRT"]["figures"]["decoding, tokens/s"] > 0
    assert "2 of 2 answers identical" in " ".join(found["EAGLE3 trees, TensorRT"]["said"])
    assert "0.png: Row 1 : " in " ".join(found["pictures, TensorRT"]["said"])


def test_growing_memory_fails(monkeypatch):
    samples, used = memory._Samples(), iter([100.0, 100.0, 100.0, 120.0, 120.0, 120.0])
    monkeypatch.setattr(memory, "_memory", lambda: {"host memory": next(used)})
    for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        samples.add(share)
    rows = samples.rows(dry=False)
    assert rows["host memory, MiB"] == {
        "found": [120.0],
        "expected": [100.0],
        "error": 20.0,
        "allowed": 16.0,
    }
    assert not outputs.passed(rows)
    assert outputs.passed(samples.rows(dry=True))


@pytest.fixture
def steps_alone(tmp_path, monkeypatch):
    """Runs steps of one line of Python in this process; returns status and statuses."""
    monkeypatch.setattr(prove, "HERE", tmp_path)
    monkeypatch.setattr(prove, "_lacking", lambda *_, **__: {})

    def run_lines(limit_s=60.0, minutes=1.0, again=False, **lines):
        steps = [
            {"name": name, "words": ["-c", line], "needs": [], "limit_s": limit_s}
            for name, line in lines.items()
        ]
        contents = {"files": {}, "platforms": [], "requirements": {}, "steps": steps}
        (tmp_path / "contents.json").write_text(json.dumps(contents))
        options = argparse.Namespace(
            minutes=minutes,
            python=sys.executable,
            dry=True,
            stand_in=False,
            again=again,
            output=tmp_path / "results",
        )
        status = prove.prove(options)
        return status, [each["status"] for each in results(tmp_path).values()]

    return run_lines


def test_an_interrupted_run_continues(steps_alone, tmp_path):
    """A failed step is not repeated; the journal's torn line is ignored."""
    interrupt = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(100)"
    lines = {
        "counts": f"open({str(tmp_path / 'counter')!r}, 'a').write('x'); raise SystemExit(3)",
        "slow": f"import os\nif not os.path.exists({str(tmp_path / 'fast')!r}): {interrupt}",
    }
    assert steps_alone(**lines) == (130, ["FAILED", "not run"])
    with (tmp_path / "results" / "journal.jsonl").open("a") as journal:
        journal.write('{"key": "torn')
    (tmp_path / "fast").touch()
    assert steps_alone(**lines) == (1, ["FAILED", "ok"])
    assert (tmp_path / "counter").read_text() == "x"
    assert steps_alone(**lines, other="print()") == (1, ["FAILED", "ok", "ok"])
    assert (tmp_path / "counter").read_text() == "xx"  # those were results of another folder


def test_failed_steps_run_again_on_request(steps_alone, tmp_path):
    counter = tmp_path / "counter"
    count = f"open({str(counter)!r}, 'a').write('x')"
    lines = {
        "fails once": f"{count}; raise SystemExit(len(open({str(counter)!r}).read()) == 1)",
        "passes": count,
    }
    assert steps_alone(**lines) == (1, ["FAILED", "ok"])
    assert steps_alone(**lines) == (1, ["FAILED", "ok"])
    assert steps_alone(again=True, **lines) == (0, ["ok", "ok"])
    assert counter.read_text() == "xxx"


def test_a_full_disk_loses_the_newest_result_alone(steps_alone, tmp_path, monkeypatch):
    lines = {"first": "print('1')", "second": "print('2')"}
    left = iter((1, 0))  # writes for which there is space

    def full(*_):
        if not next(left):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(prove.ProofError, match=r"jsonl: No space left .*; free some space"):
            steps_alone(**lines)
    assert steps_alone(**lines) == (0, ["ok", "ok"])
    report, left = tmp_path / "results" / "proof.md", iter((0,))
    before = report.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(prove.ProofError, match="results: No space left on device; free some"):
            steps_alone(**lines)
    assert report.read_text() == before
    assert {each.name for each in report.parent.iterdir()} == {
        "journal.jsonl",
        "proof.json",
        "proof.md",
    }


def test_a_signal_ends_the_step_and_its_children(tmp_path, folder):
    """`kill` loses no result, and leaves no process that holds the GPU."""
    path = folder / "contents.json"
    contents = json.loads(path.read_text())
    child = "import time; time.sleep(100)"
    line = (
        f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {child!r}]); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); time.sleep(100)"
    )
    contents["steps"] = [
        {"name": name, "words": ["-c", words], "needs": [], "limit_s": 60.0}
        for name, words in (("first", "print('1')"), ("second", line))
    ]
    path.write_text(json.dumps(contents))
    words = [folder / "prove", "--dry", "--python", sys.executable]
    process = subprocess.Popen([sys.executable, *map(str, words)], stdout=subprocess.DEVNULL)
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    process.terminate()
    assert process.wait() == 130
    assert [each["status"] for each in results(folder).values()] == ["ok", "not run"]
    number = int((tmp_path / "pid").read_text())
    until(lambda: not Path(f"/proc/{number}").exists() or "Z" in state_of(number))


def state_of(number):
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]


def until(holds):
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--minutes", "0"), "0 is no time; give minutes, as 25"),
        (("--minutes", "nan"), "nan is no time"),
        (("--output", "prove"), "prove: File exists; give another folder by --output"),
        (("--what",), "unrecognized arguments: --what"),
    ],
)
def test_wrong_arguments_change_nothing(folder, flags, error):
    given = [str(folder / each) if each == "prove" else each for each in flags]
    before = (folder / "prove").read_bytes()
    code, said, errors = run(folder, *given)
    assert (code, said) == (2, "")
    assert error in errors
    assert "Traceback" not in errors
    assert (folder / "prove").read_bytes() == before
    assert not (folder / "results").exists()


def test_the_time_budget_is_kept(steps_alone, tmp_path, capsys):
    lines = {"hangs": "import time; time.sleep(100)", "waits": "print('done')"}
    assert steps_alone(minutes=0.01, **lines) == (1, ["out of time", "not run"])
    assert "2 of 2 steps are left; the same command continues" in capsys.readouterr().out
    # The step that was cut is now the last.
    assert steps_alone(minutes=0.03, **lines) == (1, ["out of time", "ok"])
    assert results(tmp_path)["waits"]["said"] == ["done"]


def test_a_step_that_takes_too_long_fails_alone(steps_alone, tmp_path):
    lines = {"hangs": "import time; time.sleep(100)", "next": "print('done')"}
    assert steps_alone(limit_s=1.0, **lines) == (1, ["FAILED", "ok"])
    assert results(tmp_path)["hangs"]["said"] == ["it took more than 1 s"]


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda at: (at / "expected/fp16.npz").write_bytes(b"x"), "fp16.npz is damaged; copy"),
        (lambda at: (at / "bundles/fp16/model.onnx").unlink(), "model.onnx is missing; copy"),
        (lambda at: (at / "contents.json").write_text("{"), "missing or damaged; copy the folder"),
    ],
)
def test_a_damaged_folder_is_rejected(folder, damage, error):
    damage(folder)
    code, said, errors = run(folder)
    assert (code, said, len(errors.splitlines())) == (2, "", 1)
    assert errors.startswith("prove: ")
    assert error in errors
    assert not (folder / "results").exists()


def test_missing_wheels_are_named(folder):
    code, _, errors = run(folder, python=None)
    assert code == 2
    assert "the folder has wheels for no platform, not for" in errors
    assert "--platforms" in errors


@pytest.mark.nightly
def test_wheels_that_are_not_there_fail_with_a_remedy(folder):
    """The environment is made without an index, so nothing is downloaded."""
    path = folder / "contents.json"
    contents = json.loads(path.read_text())
    here = f"{os.uname().machine}-cp{sys.version_info[0]}{sys.version_info[1]}"
    contents |= {"platforms": [here], "requirements": {here: ["edgellm[device]"]}}
    path.write_text(json.dumps(contents))
    (folder / "wheels").mkdir()
    code, _, errors = run(folder, python=None)
    assert (code, len(errors.splitlines())) == (2, 1)
    assert "the environment cannot be made: " in errors
    assert "edgellm" in errors


def test_a_python_without_edgellm_is_rejected(folder, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no edgellm >&2\nexit 1\n")
    python.chmod(0o755)
    code, _, errors = run(folder, python=python)
    assert (code, len(errors.splitlines())) == (2, 1)
    assert "does not run edgellm: no edgellm; give another --python" in errors
    code, _, errors = run(folder, python=tmp_path / "absent")
    assert (code, len(errors.splitlines())) == (2, 1)
    assert "absent is no program; give the path of a Python" in errors


def test_an_output_folder_that_exists_is_left_alone(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(EdgeLLMError, match="exists") as caught:
        cli.proof_folder(tmp_path)
    assert caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_unknown_platforms_and_bundles(tmp_path):
    with pytest.raises(EdgeLLMError, match="riscv-cp312 is no platform"):
        cli.proof_folder(tmp_path / "new", platforms="riscv-cp312")
    with pytest.raises(EdgeLLMError, match="int3 is unknown"):
        cli.proof_folder(tmp_path / "new", no_wheels=True, bundles="int3")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_too_large_is_not_made(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "_MAX_BYTES", 1000)
    monkeypatch.setattr(cli, "_make_bundles", lambda *_: [])
    monkeypatch.setattr(cli, "_SOURCE", ())
    with pytest.raises(EdgeLLMError, match="more than"):
        cli.proof_folder(tmp_path / "new", no_wheels=True)
    assert not (tmp_path / "new").exists()


def test_wheels_are_asked_for_by_platform(tmp_path, monkeypatch):
    asked = []

    def pip(words, **_):
        asked.append(words)
        (tmp_path / "edgellm-0.1.0-py3-none-any.whl").touch()
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", pip)
    wheel = wheels.build_wheel(tmp_path, tmp_path)
    wheels.download_wheels("aarch64-cp310", wheel)
    words = asked[1]
    assert words[words.index("--python-version") + 1] == "310"
    assert {"--only-binary=:all:", "manylinux_2_17_aarch64", "manylinux_2_35_aarch64"} <= {*words}
    assert {f"{wheel}[device]", "cuda-python<13", "numpy<2"} <= {*words}
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess((), 1))
    with pytest.raises(EdgeLLMError, match="the wheels for x86_64-cp312 cannot be downloaded"):
        wheels.download_wheels("x86_64-cp312", wheel)
