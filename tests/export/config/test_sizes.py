"""Sizes of configs that no model has."""

from __future__ import annotations

import pytest

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.config.reader import ConfigReader


@pytest.mark.parametrize(
    ("key", "value"), [("num_hidden_layers", 10_001), ("vocab_size", 2**31), ("head_dim", 2**62)]
)
def test_sizes_beyond_any_model_are_refused(key, value):
    """Loops over layers would take all memory before a tensor is found missing."""
    with pytest.raises(UnsupportedModelError, match=f"{key} = {value} is too large"):
        ConfigReader({key: value}).positive(key)
    assert ConfigReader({key: 10_000}).positive(key) == 10_000
