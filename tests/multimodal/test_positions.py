from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2_5_VLConfig, Qwen2VLConfig, Qwen3_5Config, Qwen3VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from edgellm.core.errors import RequestError
from edgellm.multimodal.positions import rotary_positions

IMAGE = 7
MODELS = {
    "qwen3_5": (Qwen3_5Model, Qwen3_5Config),
    "qwen2_vl": (Qwen2VLModel, Qwen2VLConfig),
    "qwen2_5_vl": (Qwen2_5_VLModel, Qwen2_5_VLConfig),
    "qwen3_vl": (Qwen3VLModel, Qwen3VLConfig),
}
GRID = st.tuples(st.integers(1, 6), st.integers(1, 6))


@pytest.fixture(scope="module", params=MODELS)
def reference(request):
    """The rule of transformers, by a model with a config and no weights."""
    model_class, config_class = MODELS[request.param]
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    model.config = config_class()

    def positions(token_ids, grids):
        merge = model.config.vision_config.spatial_merge_size
        ids = torch.tensor([token_ids])
        patches = [(1, rows * merge, columns * merge) for rows, columns in grids]
        found, delta = model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == IMAGE).int(),
            image_grid_thw=torch.tensor(patches) if grids else None,
        )
        return found[:, 0].numpy(), delta.item()

    return positions


def prompt(grids, texts):
    """Texts of the given lengths before, between and after the images."""
    token_ids = [1] * texts[0]
    for (rows, columns), length in zip(grids, texts[1:], strict=True):
        token_ids += [IMAGE] * (rows * columns) + [2] * length
    return token_ids


@given(data=st.data(), grids=st.lists(GRID, max_size=5), first=st.integers(0, 5))
def test_positions_are_those_of_transformers(reference, data, grids, first):
    between = st.integers(1, 5)  # transformers takes adjacent images for one
    texts = [first] + [data.draw(between) for _ in grids]
    if grids:
        texts[-1] -= 1
    token_ids = prompt(grids, texts)
    if not token_ids:
        return
    expected, delta = reference(token_ids, grids)
    found = rotary_positions(token_ids, IMAGE, grids)
    assert found.prompt.dtype == np.int64
    assert np.array_equal(found.prompt, expected)
    assert found.delta == delta


def test_a_prompt_by_hand():
    found = rotary_positions(
        np.array([1, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, 2]), IMAGE, [(2, 3)]
    )
    assert found.prompt.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4],
        [0, 1, 1, 1, 2, 2, 2, 4],
        [0, 1, 2, 3, 1, 2, 3, 4],
    ]
    assert found.delta == 5 - 8


def test_consecutive_images():
    found = rotary_positions([IMAGE] * 5, IMAGE, [(1, 3), (2, 1)])
    assert found.prompt.tolist() == [[0, 0, 0, 3, 3], [0, 0, 0, 3, 4], [0, 1, 2, 3, 3]]
    assert found.delta == 0


@pytest.mark.parametrize(
    ("token_ids", "grids"),
    [
        ([1, IMAGE, IMAGE], []),
        ([1, IMAGE, IMAGE], [(1, 3)]),
        ([1, IMAGE], [(1, 1), (1, 1)]),
        ([IMAGE, 1, IMAGE], [(1, 2)]),
        ([1, 2], [(2, 2)]),
    ],
)
def test_image_tokens_without_a_grid_are_rejected(token_ids, grids):
    with pytest.raises(RequestError, match="image tokens"):
        rotary_positions(token_ids, IMAGE, grids)
