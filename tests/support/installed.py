"""The commands of this source tree, as pip would install them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
SCRIPTS: dict[str, str] = PROJECT["project"]["scripts"]


def install(folder: Path) -> dict[str, str]:
    """Write all commands into a folder; return the environment in which they are found."""
    for name, place in SCRIPTS.items():
        module, function = place.split(":")
        path = folder / name
        path.write_text(f"#!{sys.executable}\nfrom {module} import {function}\n{function}()\n")
        path.chmod(0o755)
    return {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / ".src"), os.environ.get("PYTHONPATH", "")]),
    }
