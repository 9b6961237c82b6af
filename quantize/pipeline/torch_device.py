"""The torch device of a host tool."""

from __future__ import annotations

import torch

from edgellm.core.errors import EdgeLLMError


def choose_device(name: str) -> torch.device:
    """Return the torch device of that name; "auto" prefers a GPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EdgeLLMError(
            f"--device {name}: {str(error).splitlines()[0]}", hint="give cpu, cuda or auto"
        ) from None
    return device
