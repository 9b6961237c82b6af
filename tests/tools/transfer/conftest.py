"""A bundle, and a simulated device: a folder with fakes of ssh and rsync."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_fakes import CONTENTS, Device, make_bundle, make_device


@pytest.fixture
def bundle(tmp_path) -> Path:
    return make_bundle(tmp_path / "bundle", CONTENTS)


@pytest.fixture
def device(tmp_path, monkeypatch) -> Device:
    found, here = make_device(tmp_path)
    for name, value in found.environment(here).items():
        monkeypatch.setenv(name, value)
    return found
