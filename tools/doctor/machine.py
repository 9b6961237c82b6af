"""Files and programs that describe the machine; tests replace them."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 20
_DEVICES = ("nvidia*", "nvmap", "nvhost*", "nvgpu/*/*")  # of GPUs, in dev


@dataclass(frozen=True, slots=True)
class Machine:
    """Root folder and search path of the machine."""

    root: Path = Path("/")  # for files like etc/nv_tegra_release
    search_path: str = os.environ.get("PATH", "")  # for programs like nvidia-smi

    def read(self, path: str) -> str | None:
        """Return the text of a file below the root; None if it is missing or unreadable."""
        try:
            return (self.root / path).read_text("utf-8", errors="replace")
        except OSError:
            return None

    def closed_devices(self) -> dict[str, str]:
        """Return the GPU's device files that this user may not open, with the group that may."""
        paths = [path for name in _DEVICES for path in (self.root / "dev").glob(name)]
        return {
            f"/{path.relative_to(self.root)}": _group(path)
            for path in paths
            if _is_of_a_group(path) and not os.access(path, os.R_OK | os.W_OK)
        }

    def ask(self, program: str, *arguments: str) -> str | None:
        """Return what a program prints; None if it is not installed.

        Raises:
            ProgramError: the program fails or times out.
        """
        found = shutil.which(program, path=self.search_path)
        if found is None:
            return None
        try:
            result = subprocess.run(
                [found, *arguments],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ProgramError(f"{program} does not end within {_TIMEOUT_S} s") from None
        except OSError as error:
            raise ProgramError(f"{program} does not start: {error.strerror}") from None
        if result.returncode:
            printed = (result.stderr or result.stdout).strip().splitlines()
            raise ProgramError(f"{program} fails: {printed[0] if printed else result.returncode}")
        return result.stdout


def _is_of_a_group(path: Path) -> bool:
    both = stat.S_IRGRP | stat.S_IWGRP
    return path.exists() and not path.is_dir() and path.stat().st_mode & both == both


def _group(path: Path) -> str:
    try:
        return path.group()
    except KeyError:  # a container may not know its name
        return str(path.stat().st_gid)


class ProgramError(Exception):
    """A program of the machine fails."""
