"""Extra modules in edgellm's packages, found like the existing ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest


@contextmanager
def added(package: ModuleType, folder: Path, **modules: str) -> Iterator[None]:
    """Extend a package with `folder`, and write modules of these names and texts there.

    A text of several lines is `<name>.py`; for a package of its own give `<name>__init__`.
    """
    folder.mkdir(exist_ok=True)
    names = []
    for name, text in modules.items():
        path = folder / f"{name}.py"
        if name.endswith("__init__"):
            path = folder / name.removesuffix("__init__") / "__init__.py"
            path.parent.mkdir()
        path.write_text(text)
        names.append(name.removesuffix("__init__"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(package, "__path__", [*package.__path__, str(folder)])
        try:
            yield
        finally:
            for name in names:
                sys.modules.pop(f"{package.__name__}.{name}", None)
                vars(package).pop(name, None)
