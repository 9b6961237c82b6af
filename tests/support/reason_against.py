"""Whether engines of a backend run on this machine; the backend's error is the reason to skip."""

from __future__ import annotations

import pytest

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime import runners


def needs(name: str) -> pytest.MarkDecorator:
    """Skip the test if a backend's engines do not run."""
    return pytest.mark.skipif(bool(why := _reason(name)), reason=f"{name}: {why}")


def _reason(name: str) -> str:
    try:
        runners.find(name).require_device()
    except EdgeLLMError as error:
        return str(error)
    return ""
