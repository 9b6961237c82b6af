"""Schemes: group sizes and algorithms."""

from __future__ import annotations

import pytest

from edgellm.core.errors import (
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.quantize.formats.schemes import SCHEMES, block_size, choose_scheme

INT4 = SCHEMES["int4_awq"]


@pytest.mark.parametrize(
    ("widths", "wanted", "expected"),
    [((256, 128), None, 128), ((256, 576), None, 64), ((96,), None, 32), ((256, 128), 32, 32)],
)
def test_int4_takes_the_largest_group_size_that_divides_all_widths(widths, wanted, expected):
    shapes = {f"layer{index}": (8, width) for index, width in enumerate(widths)}
    assert block_size(INT4, shapes, wanted) == expected


@pytest.mark.parametrize(
    ("scheme", "width", "wanted", "hint"),
    [("int4_awq", 576, 128, "leave out --block_size"), ("nvfp4", 24, None, "fp8 and int8_sq")],
)
def test_indivisible_inputs_are_rejected(scheme, width, wanted, hint):
    with pytest.raises(UnsupportedModelError, match=f"layer1 has {width} inputs") as caught:
        block_size(SCHEMES[scheme], {"layer0": (8, 1024), "layer1": (8, width)}, wanted)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("quantization", "algo", "words"),
    [
        ("int8_sq", "gptq", "--algo is for int4_awq, fp8, nvfp4"),
        ("nvfp4", "awq", "--quantization nvfp4 --algo awq: no such choice"),
        ("int4_awq", "gtpq", "did you mean gptq"),
    ],
)
def test_invalid_algorithms_are_rejected(quantization, algo, words):
    with pytest.raises(EdgeLLMError) as caught:
        choose_scheme(quantization, algo)
    assert words in f"{caught.value} {caught.value.hint}"
