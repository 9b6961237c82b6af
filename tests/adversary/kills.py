"""SIGKILL and SIGINT at a random moment of a command.

Verdict: its target is whole or as it was before; the command runs again and gives the same.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from adversary.attack import Finding, require
from adversary.broken_files import require_whole
from adversary.commands import Ended, after
from adversary.workshop import Workshop

from edgellm.core.artifact import MADE_BY_NAME, hash_file
from edgellm.core.manifest import MANIFEST_NAME

SHARE = 4
STAGE = ".out.transfer"  # from which a transfer resumes
SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}
Files = dict[str, str]


@dataclass(frozen=True, slots=True)
class Work:
    """A command that writes a folder or a file."""

    run: Callable[..., Ended]  # with the workshop, an empty folder and arguments of `Commands.run`
    target: str  # its output there
    is_artifact: bool = True  # it has a manifest with hashes
    is_heavy: bool = False  # imports torch


def _export(workshop: Workshop, folder: Path, **how: object) -> Ended:
    flags = ("--model_dir", workshop.pair.base_checkpoint, "--output_dir", folder / "out")
    flags = (*flags, "--overwrite")
    return workshop.commands.run(folder, "edgellm-export", "llm", *flags, **how)


def _build(workshop: Workshop, folder: Path, **how: object) -> Ended:
    flags = ("--onnxDir", workshop.bundle, "--engineDir", folder / "out", "--maxInputLen", 16)
    flags = (*flags, "--maxKVCacheCapacity", 32, "--overwrite")
    return workshop.commands.run(folder, "llm_build", *flags, **how)


def _infer(workshop: Workshop, folder: Path, **how: object) -> Ended:
    content = {**workshop.requests, "max_generate_length": 60}
    return workshop.infer(folder, workshop.pair.engine, content, "--eagle", "--resume", **how)


def _transfer(workshop: Workshop, folder: Path, **how: object) -> Ended:
    return workshop.commands.run(folder, "edgellm-transfer", workshop.bundle, folder / "out", **how)


def _quantize(workshop: Workshop, folder: Path, **how: object) -> Ended:
    flags = ("--model_dir", workshop.pair.base_checkpoint, "--output_dir", folder / "out")
    text = ("--calib_dataset", workshop.calibration, "--num_samples", 4, "--seq_len", 16)
    rest = ("--quantization", "fp8", "--algo", "max", "--held_out", 1, "--device", "cpu")
    return workshop.heavy_commands.run(
        folder, "edgellm-quantize", "llm", *flags, *text, *rest, seconds=300, **how
    )


def _train(workshop: Workshop, folder: Path, **how: object) -> Ended:
    flags = ("--base_model_dir", workshop.pair.base_checkpoint, "--output_dir", folder / "out")
    data = ("--data", workshop.conversations, "--held_out", 2, "--max_tokens", 32)
    rest = ("--epochs", 1, "--save_every", 2, "--batch_tokens", 64, "--device", "cpu")
    rest = (*rest, "--draft_vocab_size", 40)
    return workshop.heavy_commands.run(
        folder, "edgellm-train-draft", *flags, *data, *rest, seconds=300, **how
    )


WORKS = {
    "export": Work(_export, "out"),
    "build": Work(_build, "out"),
    "inference": Work(_infer, "out.json", is_artifact=False),
    "transfer": Work(_transfer, "out"),
    "quantize": Work(_quantize, "out", is_artifact=False, is_heavy=True),
    "train": Work(_train, "out", is_artifact=False, is_heavy=True),
}
LIGHT = [name for name, work in WORKS.items() if not work.is_heavy]
_SECONDS: dict[str, float] = {}  # time of a whole run
_WHOLE: dict[str, Files] = {}  # its output


def attack(workshop: Workshop, number: int, rng: random.Random, folder: Path) -> str:
    names = [*LIGHT, *LIGHT, *WORKS]
    name = names[number % len(names)]
    work = WORKS[name]
    if name not in _WHOLE:
        _learn(workshop, name, folder)
    how, said = rng.choice(sorted(SIGNALS)), ""
    before: Files = {}
    if name in ("export", "build", "transfer") and rng.random() < 0.4:  # something is there already
        _require_done(work.run(workshop, folder))
        before = files(folder)
    try:
        for _ in range(rng.choice([1, 1, 2])):
            moment = rng.random() * _SECONDS[name] * 1.1
            said = f"{how} after {moment:.3f} s of {name}"
            ended = work.run(workshop, folder, strike=after(moment, SIGNALS[how]))
            _require_whole_or_before(work, folder, ended, before, how, _WHOLE[name])
        _require_done(work.run(workshop, folder))
        found = files(folder)
        require(found == _WHOLE[name], _difference(found, _WHOLE[name]))
    except Finding as error:
        raise Finding(f"{said}: {error}") from None
    return f"{name}: {how}"


def _learn(workshop: Workshop, name: str, folder: Path) -> None:
    """Measure time and output of a whole run; its first run also fills caches."""
    for _ in range(2):
        begin = time.monotonic()
        _require_done(WORKS[name].run(workshop, folder))
        _SECONDS[name], _WHOLE[name] = time.monotonic() - begin, files(folder)
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _require_done(ended: Ended) -> None:
    require(ended.require_clear() == "done", f"a rerun fails: {ended}")


def _require_whole_or_before(
    work: Work, folder: Path, ended: Ended, before: Files, how: str, whole: Files
) -> None:
    require("Traceback" not in ended.stderr, f"a traceback: {ended}")
    require(not ended.timed_out, f"a hang: {ended}")
    target = folder / work.target
    # Killed between two moves a folder has no manifest, and every command rejects it
    is_marked = (target / MANIFEST_NAME).exists()
    if work.is_artifact and target.exists() and (is_marked or how != "SIGKILL"):
        require_whole(target, "killed")
    if how != "SIGKILL" and ended.code not in (0, -SIGNALS[how]):
        lines = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
        require(len(lines) == 1 and ended.code == 130, f"not one line of an interrupt: {ended}")
        if work.is_artifact:
            found = {name: one for name, one in files(folder).items() if not _is_stage(name)}
            require(found in (before, whole), _difference(found, before))


def _is_stage(name: str) -> bool:
    """Whether a transfer resumes from a file."""
    return name.split("/")[0] == STAGE


def files(folder: Path) -> Files:
    """Hashes by name, without files that hold times."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.name in ("in.json", ".checked.json", MADE_BY_NAME):
            continue
        name = path.relative_to(folder).as_posix()
        if path.name == "out.json":
            found[name] = json.dumps(_without_times(json.loads(path.read_text("utf-8"))))
        elif not path.name.startswith(("edgellm_", "training", "manifest.json")):
            found[name] = hash_file(path).sha256
    return found


def _without_times(content: dict[str, list[dict[str, object]]]) -> object:
    return [{**one, "timings": None} for one in content["responses"]]


def _difference(found: Files, expected: Files) -> str:
    names = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    return f"other files than before: {names[:8]}"
