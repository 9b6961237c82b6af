"""Broken input files of every format, given to the command that reads them.

Verdict: one line and nothing half-written, or a result that is whole.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from adversary.attack import Finding, require
from adversary.commands import Ended
from adversary.mutations import break_bytes, break_file, break_json
from adversary.workshop import Workshop, answers

from edgellm.core.artifact import verify_files
from edgellm.core.errors import (
    EdgeLLMError,
    RequestError,
)
from edgellm.core.manifest import MANIFEST_NAME, FileRecord
from edgellm.multimodal.images import open_image
from edgellm.multimodal.media import Video
from edgellm.multimodal.video import open_film

SHARE = 28  # each kind twice


@dataclass(frozen=True, slots=True)
class Subject:
    """Inputs of a format, and the command that reads them."""

    inputs: Callable[[Workshop], Path]  # a folder, which is copied
    breaks: tuple[str, ...]  # patterns of files; one of them breaks
    run: Callable[[Workshop, Path, Path], Ended]  # with the broken folder, in an empty one
    is_hashed: bool = False  # its manifest has the hashes of its files


def _export(workshop: Workshop, broken: Path, folder: Path) -> Ended:
    return _exporting(workshop, broken, folder)


def _export_gguf(workshop: Workshop, broken: Path, folder: Path) -> Ended:
    return _exporting(workshop, broken / "model.gguf", folder)


def _exporting(workshop: Workshop, model: Path, folder: Path) -> Ended:
    flags = ("--model_dir", model, "--output_dir", folder / "out", "--dtype", "fp32")
    return workshop.commands.run(folder, "edgellm-export", "llm", *flags)


def _export_merged(workshop: Workshop, broken: Path, folder: Path) -> Ended:
    flags = ("--model_dir", workshop.checkpoint, "--lora_dir", broken, "--dtype", "fp32")
    return workshop.commands.run(
        folder, "edgellm-export", "llm", *flags, "--output_dir", folder / "out"
    )


def _export_draft(workshop: Workshop, broken: Path, folder: Path) -> Ended:
    flags = ("--base_model_dir", workshop.pair.base_checkpoint, "--draft_model_dir", broken)
    return workshop.commands.run(
        folder, "edgellm-export", "draft", *flags, "--output_dir", folder / "out", "--dtype", "fp32"
    )


def _build(workshop: Workshop, broken: Path, folder: Path) -> Ended:
    sizes = ("--maxInputLen", 16, "--maxKVCacheCapacity", 32)
    flags = ("--onnxDir", broken, "--engineDir", folder / "out", *sizes)
    return workshop.commands.run(folder, "llm_build", *flags)


def _infer(workshop: Workshop, broken: Path, folder: Path) -> Ended:
    ended = workshop.infer(folder, broken, workshop.requests, "--eagle", "--verify")
    (folder / "in.json").unlink()
    if (folder / "out.json").exists():
        found = answers(folder / "out.json")
        (folder / "out.json").unlink()
        require(found == workshop.texts, f"other answers of a broken engine: {ended.words}")
    return ended


SUBJECTS = {
    "safetensors": Subject(lambda shop: shop.checkpoint, ("model.safetensors",), _export),
    "config": Subject(
        lambda shop: shop.checkpoint, ("config.json", "generation_config.json"), _export
    ),
    "tokenizer": Subject(
        lambda shop: shop.checkpoint, ("tokenizer.json", "tokenizer_config.json"), _export
    ),
    "index": Subject(
        lambda shop: shop.sharded, ("model.safetensors.index.json", "model-*.safetensors"), _export
    ),
    "quantized": Subject(
        lambda shop: shop.quantized, ("*.json", "*.safetensors", "*.safetensors"), _export
    ),
    "pickle": Subject(lambda shop: shop.pickled, ("pytorch_model.bin",), _export),
    "gguf": Subject(lambda shop: shop.gguf, ("model.gguf",), _export_gguf),
    "adapter": Subject(lambda shop: shop.adapter, ("adapter_*",), _export_merged),
    "draft": Subject(
        lambda shop: shop.pair.draft_checkpoint, ("config.json", "model.safetensors"), _export_draft
    ),
    "bundle": Subject(lambda shop: shop.bundle, ("*",), _build, is_hashed=True),
    "engine": Subject(lambda shop: shop.pair.engine, ("*", "*/*"), _infer, is_hashed=True),
}
KINDS = (*SUBJECTS, "requests", "picture", "film")
HEAVY_EVERY = 40  # cases; the last one imports torch


def attack(workshop: Workshop, number: int, rng: random.Random, folder: Path) -> str:
    if number >= SHARE and number % HEAVY_EVERY == HEAVY_EVERY - 1:
        return _break_calibration(workshop, rng, folder)
    kind = KINDS[number % len(KINDS)]
    if kind == "requests":
        return _break_requests(workshop, rng, folder)
    if kind in ("picture", "film"):
        return _break_picture(workshop, rng, folder, is_film=kind == "film")
    subject = SUBJECTS[kind]
    shutil.copytree(subject.inputs(workshop), folder / "in")
    (folder / "run").mkdir()
    found = sorted(p for name in subject.breaks for p in (folder / "in").glob(name) if p.is_file())
    broken = rng.choice(found)
    before = broken.read_bytes()
    how = break_file(broken, rng)
    ended = subject.run(workshop, folder / "in", folder / "run")
    said = f"{kind}: {broken.name}: {how}"
    outcome = _judged(ended, folder / "run", said)
    if outcome == "done" and subject.is_hashed and broken.name != MANIFEST_NAME:
        is_same = broken.is_file() and broken.read_bytes() == before
        is_listed = broken.relative_to(folder / "in").as_posix() in _listed(folder / "in")
        require(is_same or not is_listed, f"a change was not seen: {said}\n{ended.words}")
    return f"{kind}: {outcome}"


def _listed(folder: Path) -> set[str]:
    return set(json.loads((folder / MANIFEST_NAME).read_text("utf-8")).get("files", ()))


def _judged(ended: Ended, folder: Path, said: str) -> str:
    try:
        outcome = ended.require_clear()
    except Finding as error:
        raise Finding(f"{said}\n{error}") from None
    left = sorted(path.name for path in folder.iterdir())
    if outcome != "done":
        require(not left, f"{said}: left {left}\n{ended.words}\n{ended.stderr}")
    elif left:
        require(left == ["out"], f"{said}: left {left}\n{ended.words}")
        require_whole(folder / "out", said)
    return outcome


def require_whole(folder: Path, said: str) -> None:
    """Require that every file of the manifest has its hash."""
    try:
        files = json.loads((folder / MANIFEST_NAME).read_text("utf-8"))["files"]
        verify_files(folder, {name: FileRecord(**record) for name, record in files.items()})
    except (EdgeLLMError, OSError) as error:
        raise Finding(f"{said}: {folder} is not whole: {error}") from None


def _break_requests(workshop: Workshop, rng: random.Random, folder: Path) -> str:
    """A request file: every response is an output or an error with its reason."""
    content = {**workshop.requests, "max_generate_length": 3, "top_k": 4, "seed": 1}
    if rng.random() < 0.7:
        how, text = break_json(content, rng)
        data = text.encode("utf-8", "surrogatepass")
    else:
        how, data = break_bytes(json.dumps(content).encode(), rng)
    ended = workshop.infer(folder, workshop.pair.engine, data)
    try:
        outcome = ended.require_clear()
    except Finding as error:
        raise Finding(f"requests: {how}\n{error}") from None
    left = {path.name for path in folder.iterdir()} - {"in.json"}
    require(left <= {"out.json"}, f"requests: {how}: left {left}")
    require(outcome == "rejected" or "out.json" in left, f"requests: {how}: no answers: {ended}")
    if "out.json" in left:
        for found in json.loads((folder / "out.json").read_text("utf-8"))["responses"]:
            reason = found.get("error") or found.get("finish_reason")
            require(reason, f"requests: {how}: {found}")
    return f"requests: {outcome}"


def _break_calibration(workshop: Workshop, rng: random.Random, folder: Path) -> str:
    """Text for quantization: conversations or paragraphs."""
    source = rng.choice([workshop.calibration, workshop.conversations])
    (folder / "in").mkdir()
    (folder / "run").mkdir()
    broken = folder / "in" / source.name
    shutil.copyfile(source, broken)
    how = break_file(broken, rng)
    flags = ("--model_dir", workshop.checkpoint, "--output_dir", folder / "run" / "out")
    rows = ("--num_samples", 4, "--seq_len", 16, "--held_out", 1, "--device", "cpu")
    ended = workshop.heavy_commands.run(
        folder,
        "edgellm-quantize",
        "llm",
        *flags,
        "--quantization",
        "fp8",
        *rows,
        "--calib_dataset",
        broken,
        seconds=300,
    )
    outcome = ended.require_clear()
    left = sorted(path.name for path in (folder / "run").iterdir())
    require(left == (["out"] if outcome == "done" else []), f"{source.name}: {how}: left {left}")
    return f"calibration: {outcome}"


def _break_picture(workshop: Workshop, rng: random.Random, folder: Path, *, is_film: bool) -> str:
    """A picture or a film: an RGB picture, or a `RequestError` of one line."""
    kind, encoded = rng.choice(sorted((workshop.films if is_film else workshop.pictures).items()))
    how, data = break_bytes(encoded, rng)
    (folder / kind).write_bytes(data)
    said = f"{kind}: {how}: {folder / kind}"
    try:
        if is_film:
            shown = open_film(Video.of(kind), folder, lambda total, _: range(min(total, 50)), 2.0)
            require(shown.frames and shown.frames[0].mode == "RGB", f"no frames of {said}")
            require(
                list(shown.seconds) == sorted(shown.seconds), f"times of {said}: {shown.seconds}"
            )
        else:
            require(open_image(kind, folder).mode == "RGB", f"no RGB of {said}")
    except RequestError as error:
        require("\n" not in str(error) and error.hint, f"{said}: {error!r}")
        return f"{kind}: rejected"
    return f"{kind}: read"
