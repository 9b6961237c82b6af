"""Seeds of requests."""

from __future__ import annotations

import secrets


def seed_or_any(seed: int | None) -> int:
    """A seed from 0 to 2^63 - 1; without one the answer is another each time."""
    return secrets.randbits(63) if seed is None else seed % 2**63
