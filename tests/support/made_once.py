"""Engines and checkpoints that all workers of a run share: the first that needs one makes it."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

Made = TypeVar("Made")


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Made]) -> Made:
    """Return what `make` returned for an empty folder, in this worker or another one.

    Other workers wait for it, and read what it wrote at the same time: tests change copies only.

    Args:
        factory: the temporary folder of a worker, which is inside that of the run.
        name: of the folder, unique in a run.
        make: writes files into the folder, and returns what pickle can store.
    """
    run = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        run = run.parent
    folder, result = run / f"once-{name}", run / f"once-{name}.pickle"
    with (run / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
            folder.mkdir()
            result.write_bytes(pickle.dumps(make(folder)))
    return pickle.loads(result.read_bytes())
