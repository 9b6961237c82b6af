#!/usr/bin/env python3
"""Runs the steps of this folder's proof, each in a process of its own.

Needs Python 3.10 and its standard library alone; the steps run in an environment that is made of
the folder's wheels. Results go to a journal, from which an interrupted run continues.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STEPS = "edgellm.scripts.proof_folder.steps"
CONTENTS, JOURNAL = "contents.json", "journal.jsonl"
DRY, STAND_IN = "--dry", "--stand_in"
OK, FAILED, SKIPPED, CUT = "ok", "FAILED", "skipped", "out of time"
_LINES = 12  # of a step's output that are kept
_INTERRUPTED = 130  # exit status, as shells have it


class ProofError(Exception):
    """An error with its remedy."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"prove: {message}; {hint}")


@dataclass(frozen=True)
class Clock:
    """The time budget."""

    end: float  # of `time.monotonic`

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()


# ------------------------------------------------------------------------------------ the folder
def read_contents() -> dict[str, Any]:
    """The folder's list of files, steps and platforms, after all files were compared with it."""
    path = HERE / CONTENTS
    try:
        contents = json.loads(path.read_text("utf-8"))
        files = contents["files"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ProofError(f"{path} is missing or damaged", "copy the folder again") from None
    for name, expected in files.items():
        if not (HERE / name).is_file():
            raise ProofError(f"{HERE / name} is missing", "copy the folder again")
        if sha256(HERE / name) != expected:
            raise ProofError(f"{HERE / name} is damaged", "copy the folder again")
    contents["key"] = sha256(path)
    return contents


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while part := stream.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


# ------------------------------------------------------------------------------- the environment
def environment(given: str, contents: dict[str, Any], output: Path) -> str:
    """The Python that runs the steps: the given one, or one with the folder's wheels.

    Raises:
        ProofError: the folder has no wheels for this Python, or they cannot be installed.
    """
    if given:
        if shutil.which(given) is None:
            raise ProofError(f"--python {given} is no program", "give the path of a Python")
        return given
    here = f"{platform.machine()}-cp{sys.version_info[0]}{sys.version_info[1]}"
    if here not in contents["platforms"]:
        held = ", ".join(contents["platforms"]) or "no platform"
        raise ProofError(
            f"the folder has wheels for {held}, not for {here}",
            f"make it with --platforms {here}, or give --python with edgellm's Python",
        )
    venv = output / "venv"
    python = str(venv / "bin" / "python")
    if (venv / contents["key"]).exists():
        return python
    # TensorRT's module is a package of the system.
    flags = ["--system-site-packages", "--clear"]
    _install([sys.executable, "-m", "venv", *flags, str(venv)], "sudo apt install python3-venv")
    wheels = HERE / "wheels"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheels)]
    _install([*pip, *contents["requirements"][here]], "copy the folder again")
    (venv / contents["key"]).touch()
    return python


def _install(words: list[str], remedy: str) -> None:
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    if result.returncode:
        said = (result.stderr or result.stdout).strip().splitlines() or ["no output"]
        raise ProofError(
            f"the environment cannot be made: {said[-1]}", f"{remedy}, or give --python"
        )


# --------------------------------------------------------------------------------------- a step
def run_step(
    python: str, step: dict[str, Any], clock: Clock, flags: Sequence[str]
) -> tuple[str, dict[str, Any]]:
    """Run a step; return its status and what it printed as JSON in the last line."""
    limit = min(step["limit_s"], clock.left_s)
    taken = [flag for flag in flags if flag != STAND_IN or "tensorrt" in step["needs"]]
    words = [python, *step["words"], *taken]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            words,
            cwd=HERE,
            env=_variables(),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            _end(process)
            if limit < step["limit_s"]:
                return CUT, {}
            return FAILED, {"said": [f"it took more than {limit:.0f} s"]}
        except KeyboardInterrupt:
            _end(process)
            raise
        said.seek(0)
        lines = said.read().strip().splitlines()
    result = _printed(lines)
    if code:
        return FAILED, {"said": lines[-_LINES:] or [f"exit status {code}"], **result}
    if "skipped" in result:
        return SKIPPED, {"said": [result["skipped"]]}
    return OK, result


def _variables() -> dict[str, str]:
    """The environment of a step, which finds the folder's programs."""
    paths = [HERE / "proof" / one for one in ("", "benchmarks", "tests", "tests/support")]
    path = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def _end(process: subprocess.Popen[Any]) -> None:
    """End a step with its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _printed(lines: list[str]) -> dict[str, Any]:
    """The JSON object of the last line, else all last lines."""
    with contextlib.suppress(ValueError, IndexError):
        if isinstance(found := json.loads(lines[-1]), dict):
            return found if found.keys() & {"said", "skipped", "outputs"} else {"figures": found}
    return {"said": lines[-_LINES:]}


# ------------------------------------------------------------------------------------ the journal
def read_journal(path: Path, key: str) -> dict[str, dict[str, Any]]:
    """Results of this folder and mode by step; a torn line is ignored."""
    found: dict[str, dict[str, Any]] = {}
    if not path.exists():
        return found
    for line in path.read_text("utf-8", "replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            if entry["key"] == key:
                found[entry["step"]] = entry
    return found


def append(path: Path, entry: dict[str, Any]) -> None:
    """Append a line, and flush it to the disk, since boards lose power."""
    torn = path.exists() and not path.read_text("utf-8", "replace").endswith("\n")
    with path.open("a", encoding="utf-8") as stream:
        stream.write(("\n" if torn else "") + json.dumps(entry) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


# ------------------------------------------------------------------------------------ the report
def write_report(
    output: Path,
    steps: list[dict[str, Any]],
    done: dict[str, dict[str, Any]],
    flags: Sequence[str],
) -> None:
    """Write `proof.json` and `proof.md`."""
    names = [step["name"] for step in steps]
    results = [done.get(name, {"step": name, "status": "not run"}) for name in names]
    facts = {
        "machine": platform.machine(),
        "system": platform.platform(),
        "dry": DRY in flags,
        "stand_in": STAND_IN in flags,
    }
    content = {"date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **facts, "steps": results}
    _replace(output / "proof.json", json.dumps(content, indent=1))
    title = "# A dry run: nothing ran on a GPU" if DRY in flags else "# edgellm on a GPU"
    if STAND_IN in flags:
        title += "; torch computed the engines of TensorRT"
    lines = [title, "", f"{content['date']}, {facts['system']}", ""]
    lines += ["| step | result | seconds | reason |", "|---|---|---|---|"]
    for each in results:
        seconds = f"{each['seconds']:.1f}" if "seconds" in each else ""
        reason = "; ".join(each["said"]) if each["status"] == SKIPPED else ""
        lines.append(f"| {each['step']} | {each['status']} | {seconds} | {reason} |")
    lines += ["", "| step | output | found | expected | error | allowed |", "|---|" + 5 * "---|"]
    for each in results:
        lines += [_row(each["step"], *pair) for pair in _shown(each.get("outputs", {}))]
    for each in results:
        text = "\n".join(each.get("said", ())) or _figures(each)
        if text and each["status"] != SKIPPED:
            lines += ["", f"## {each['step']}", "", "```", text, "```"]
    _replace(output / "proof.md", "\n".join(lines))


def _replace(path: Path, text: str) -> None:
    """Write a file whole, or leave it as it was."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(f"{text}\n", "utf-8")
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _shown(outputs: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Outputs over their limit, and of each kind ("K/V of ...") the one that is closest to it."""
    worst: dict[str, str] = {}
    for name, one in outputs.items():
        kind = name.partition(" of ")[0]
        if kind not in worst or _share(one) > _share(outputs[worst[kind]]):
            worst[kind] = name
    chosen = worst.values()
    return [(name, one) for name, one in outputs.items() if name in chosen or _share(one) > 1]


def _share(one: dict[str, Any]) -> float:
    """The error in limits."""
    error, allowed = one["error"], one["allowed"]
    if allowed is None or error == 0:
        return 0.0
    return error / allowed if allowed else math.inf


def _row(step: str, name: str, one: dict[str, Any]) -> str:
    cells = [one[key] for key in ("found", "expected", "error", "allowed")]
    return f"| {step} | {name} | " + " | ".join(map(_cell, cells)) + " |"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_cell, value))
    if value is None:
        return "not judged"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _figures(result: dict[str, Any]) -> str:
    return "\n".join(f"{name}: {_cell(value)}" for name, value in result.get("figures", {}).items())


# ---------------------------------------------------------------------------------------- main
def steps_to_run(
    steps: list[dict[str, Any]], done: dict[str, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Steps without a result; those that ran out of time before come last."""
    waiting = [step for step in steps if step["name"] not in done]
    yield from waiting
    yield from (step for step in steps if done.get(step["name"], {}).get("status") == CUT)


def prove(options: argparse.Namespace) -> int:
    """Run the steps; return the exit status."""
    clock = Clock(time.monotonic() + 60 * options.minutes)
    contents = read_contents()
    output = options.output or HERE / "results"
    chosen = {DRY: options.dry, STAND_IN: options.stand_in}
    flags = [flag for flag, is_chosen in chosen.items() if is_chosen]
    journal, key = output / JOURNAL, contents["key"] + "".join(flag[1:] for flag in flags)
    with _written(output, "give another folder by --output"):
        output.mkdir(parents=True, exist_ok=True)
        journal.open("a").close()
    python = environment(options.python, contents, output)
    steps, done = contents["steps"], read_journal(journal, key)
    if options.again:
        done = {name: one for name, one in done.items() if one["status"] != FAILED}
    lacking = _lacking(python, flags)
    status = 0
    try:
        for step in list(steps_to_run(steps, done)):
            if clock.left_s <= 0:
                break
            entry = _result(python, step, clock, lacking, flags)
            entry = {"key": key, "step": step["name"], **entry}
            with _written(journal, "free some space; the same command continues"):
                append(journal, entry)
            done[step["name"]] = entry
            print(f"{entry['status']:11} {step['name']}, {entry['seconds']:.1f} s", flush=True)
    except KeyboardInterrupt:
        status = _INTERRUPTED
    with _written(output, "free some space; the same command writes the report"):
        write_report(output, steps, done, flags)
    print(f"{output / 'proof.md'} and .json")
    found = [done.get(step["name"], {}).get("status") for step in steps]
    if left := sum(each in (None, CUT) for each in found):
        print(f"{left} of {len(steps)} steps are left; the same command continues")
    return status or int(any(each not in (OK, SKIPPED) for each in found))


@contextlib.contextmanager
def _written(path: Path, remedy: str) -> Iterator[None]:
    """Explain why a file cannot be written."""
    try:
        yield
    except OSError as error:
        raise ProofError(f"{path}: {error.strerror}", remedy) from None


def _result(
    python: str,
    step: dict[str, Any],
    clock: Clock,
    lacking: dict[str, str],
    flags: Sequence[str],
) -> dict[str, Any]:
    """Status, seconds and result of a step, which is skipped without what it needs."""
    start = time.monotonic()
    if why := next(filter(None, (lacking.get(need) for need in step["needs"])), ""):
        status, result = SKIPPED, {"said": [why]}
    else:
        status, result = run_step(python, step, clock, flags)
    return {"status": status, "seconds": round(time.monotonic() - start, 3), **result}


def _lacking(python: str, flags: Sequence[str]) -> dict[str, str]:
    """Why this machine cannot run the steps of a need; "": it can."""
    words = [python, "-m", STEPS, "available", *flags]
    result = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=HERE, env=_variables()
    )
    if result.returncode:
        said = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise ProofError(f"{python} does not run edgellm: {said}", "give another --python")
    return json.loads(result.stdout.splitlines()[-1])


def _minutes(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (minutes := float(text)) < math.inf:
            return minutes
    raise argparse.ArgumentTypeError(f"{text} is no time; give minutes, as 25")


def _end_by_signal(number: int, _: Any) -> None:
    raise KeyboardInterrupt(number)


def main() -> None:
    """Run the proof; the exit status is 1 if a step failed or is left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--minutes", type=_minutes, default=25, help="End after this time. Default: 25 minutes."
    )
    parser.add_argument(
        "--dry", action="store_true", help="Run on the CPU and on a fake GPU. Default: off."
    )
    parser.add_argument(
        "--stand_in",
        action="store_true",
        help="Compute TensorRT's engines with torch; kernels, caches and graphs are edgellm's. "
        "Default: off.",
    )
    parser.add_argument(
        "--again", action="store_true", help="Run failed steps again. Default: off."
    )
    parser.add_argument(
        "--python", default="", help="Run the steps in this Python. Default: the folder's wheels."
    )
    parser.add_argument(
        "--output", type=Path, help="Write results here. Default: results, in the folder."
    )
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):  # a step's processes must end, too
        signal.signal(number, _end_by_signal)
    try:
        sys.exit(prove(options))
    except KeyboardInterrupt:  # before the first step
        sys.exit(_INTERRUPTED)
    except ProofError as error:
        print(error, file=sys.stderr)
    except OSError as error:
        remedy = "see that the folder of temporary files can be written, or set TMPDIR"
        print(f"prove: {error}; {remedy}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
