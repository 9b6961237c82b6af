"""A disk that becomes full while a command writes.

A limit of the size of files works everywhere; where a small file system can be mounted (Linux, with
the rights for it), the disk itself is small. Verdict: one line, and nothing half-written.
"""

from __future__ import annotations

import contextlib
import functools
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from adversary.attack import Finding, require
from adversary.broken_files import require_whole
from adversary.kills import LIGHT, STAGE, WORKS
from adversary.workshop import Workshop

SHARE = 10


def attack(workshop: Workshop, number: int, rng: random.Random, folder: Path) -> str:
    name = (*LIGHT, *LIGHT, *WORKS)[number % (2 * len(LIGHT) + len(WORKS))]
    num_bytes = round(2 ** rng.uniform(12, 21))  # stderr is a file, too, and its text must fit
    uses_disk = rng.random() < 0.5 and _can_mount(str(folder.parent))
    said = f"{name} with {num_bytes} bytes {'on the disk' if uses_disk else 'a file'}"
    with (
        _small(folder / "disk", num_bytes) if uses_disk else contextlib.nullcontext(folder) as place
    ):
        limits = {} if uses_disk else {"RLIMIT_FSIZE": num_bytes}
        try:
            ended = WORKS[name].run(workshop, place, limits=limits)
            outcome = ended.require_clear()
        except Finding as error:
            raise Finding(f"{said}: {error}") from None
        except OSError:  # not even the request file fits
            return f"{name}: no room for the input"
        _require_nothing_half(place, name, outcome, said)
    return f"{name}: {outcome}"


def _require_nothing_half(place: Path, name: str, outcome: str, said: str) -> None:
    work = WORKS[name]
    target = place / work.target
    if outcome == "rejected" and not (work.is_heavy or name == "inference"):
        left = sorted({path.name for path in place.iterdir()} - {STAGE})
        require(not left, f"{said}: left {left}")
    elif work.is_artifact and target.exists():
        require_whole(target, said)


@functools.cache
def _can_mount(folder: str) -> bool:
    place = Path(folder) / "probe"
    try:
        with _small(place, 1 << 16):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@contextlib.contextmanager
def _small(place: Path, num_bytes: int) -> Iterator[Path]:
    """A file system of this size in bytes."""
    place.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={max(num_bytes, 8192)}", "tmpfs", str(place)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        shutil.rmtree(place)
        raise
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True, capture_output=True)
        shutil.rmtree(place)
