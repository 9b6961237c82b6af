"""Seeds of requests."""

from __future__ import annotations

import secrets


def seed_or_any(seed: int | None) -> int:
    """A seed from 0 to 2^63 - 1; random if none is given."""
    return secrets.randbits(63) if seed is None else seed % 2**63
