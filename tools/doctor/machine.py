"""Files and programs that describe the machine; tests replace them."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 20


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


class ProgramError(Exception):
    """A program of the machine fails."""
