"""Which residual streams of a base feed a draft, see `model_spec.DraftSpec`."""

from __future__ import annotations

from edgellm.core.errors import UnsupportedModelError

_BY_FLAG = "name the streams: --hidden_taps a,b,c (i enters layer i)"


def default_taps(num_layers: int, remedy: str = _BY_FLAG) -> tuple[int, int, int]:
    """The inputs of layers 2, n/2 and n-3, as in EAGLE-3 (arXiv 2503.01840).

    `remedy`: hint how to choose taps explicitly.

    Raises:
        UnsupportedModelError: the base has too few layers for three different taps.
    """
    taps = (2, num_layers // 2, num_layers - 3)
    if not taps[0] < taps[1] < taps[2]:
        raise UnsupportedModelError(
            f"a base of {num_layers} layers is too small for the default taps: "
            f"{', '.join(map(str, taps))} are not three ascending layers",
            hint=remedy,
        )
    return taps


def check_taps(taps: tuple[int, ...], num_layers: int, source: str) -> tuple[int, ...]:
    """`taps`, if all exist in ascending order; `source` is their origin for messages.

    Raises:
        UnsupportedModelError: out of range, or not ascending.
    """
    shown = ", ".join(map(str, taps))
    if not all(0 <= tap <= num_layers for tap in taps):
        raise UnsupportedModelError(
            f"{source}: tap {shown} is outside of 0 to {num_layers}, "
            f"the base has {num_layers} layers",
            hint="give the base that the draft was trained for, or other taps",
        )
    if list(taps) != sorted(taps):
        raise UnsupportedModelError(f"{source}: the taps {shown} do not ascend")
    return taps
