"""The files and programs that tell what a machine is; tests put others in their place."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_PATIENCE_S = 20


@dataclass(frozen=True, slots=True)
class Machine:
    """Where to look."""

    root: Path = Path("/")  # of files like etc/nv_tegra_release
    search_path: str = os.environ.get("PATH", "")  # of programs like nvidia-smi

    def read(self, path: str) -> str | None:
        """A file below the root; None where there is none or it cannot be read."""
        try:
            return (self.root / path).read_text("utf-8", errors="replace")
        except OSError:
            return None

    def ask(self, program: str, *arguments: str) -> str | None:
        """What a program prints; None where there is none.

        Raises:
            ProgramError: it fails, or does not come back.
        """
        found = shutil.which(program, path=self.search_path)
        if found is None:
            return None
        try:
            result = subprocess.run(
                [found, *arguments],
                capture_output=True,
                text=True,
                timeout=_PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ProgramError(f"{program} does not answer") from None
        except OSError as error:
            raise ProgramError(f"{program} does not start: {error.strerror}") from None
        if result.returncode:
            said = (result.stderr or result.stdout).strip().splitlines()
            raise ProgramError(f"{program} fails: {said[0] if said else result.returncode}")
        return result.stdout


class ProgramError(Exception):
    """A program of the machine's own does not work."""
