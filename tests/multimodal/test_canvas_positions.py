"""Canvas M-RoPE of MiniCPM-V 4.7 equals that of transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import MiniCPMV4_7Config
from transformers.models.minicpmv4_7.modeling_minicpmv4_7 import MiniCPMV4_7Model

from edgellm.core.errors import RequestError
from edgellm.multimodal.canvas_positions import Tags, canvas_positions

IMAGE, START, END, SLICE, SLICE_END, NEWLINE, NUMBER = range(7, 14)
TAGS = Tags(
    image_start=START, image_end=END, slice_start=SLICE, slice_end=SLICE_END, newline=NEWLINE
)
SIDE = st.integers(1, 9)
GRID = st.tuples(SIDE, SIDE)
WHOLE = st.tuples(st.integers(1, 40), st.integers(1, 12))
# An image: its tokens, rows and columns of slices, the tokens of each, and the text before it
PICTURE = st.tuples(
    WHOLE,
    st.one_of(st.just((0, 0)), st.tuples(st.integers(1, 4), st.integers(1, 4))),
    GRID,
    st.lists(st.sampled_from([1, NEWLINE, NUMBER, END]), max_size=4),
)


@pytest.fixture(scope="module")
def reference():
    """The rule of transformers, by a model with a config and no weights."""
    model = MiniCPMV4_7Model.__new__(MiniCPMV4_7Model)
    torch.nn.Module.__init__(model)
    names = ("image_start", "image_end", "slice_start", "slice_end", "newline")
    ids = {f"{name}_id": getattr(TAGS, name) for name in names}
    model.config = MiniCPMV4_7Config(image_token_id=IMAGE, **ids)

    def positions(token_ids, grids):
        ids, sizes = torch.tensor([token_ids]), torch.tensor(grids) * 4
        kinds = (ids == IMAGE).int()
        found, delta = model.get_rope_index(ids, mm_token_type_ids=kinds, target_sizes=sizes)
        return found[:, 0].numpy(), delta.item()

    return positions


def prompt(pictures):
    """Token ids as the processor writes them, and the grids of all runs of image tokens."""
    ids, grids = [], []
    for whole, (rows, columns), part, before in pictures:
        ids += [*before, START, *[IMAGE] * (whole[0] * whole[1]), END]
        grids.append(whole)
        for row in range(rows):
            ids += [NEWLINE] if row else []
            ids += [SLICE, *[IMAGE] * (part[0] * part[1]), SLICE_END] * columns
            grids += [part] * columns
    return ids, grids


@given(pictures=st.lists(PICTURE, min_size=1, max_size=4), after=st.lists(st.just(2), max_size=3))
@example([((1, 1), (0, 0), (1, 1), []), ((40, 1), (2, 3), (4, 6), [])], [])
@example([((5, 4), (3, 1), (2, 7), [1])], [NEWLINE, 2])
def test_positions_are_those_of_transformers(reference, pictures, after):
    ids, grids = prompt(pictures)
    ids += after
    expected, delta = reference(ids, grids)
    found = canvas_positions(ids, IMAGE, grids, TAGS)
    assert np.array_equal(found.prompt, expected)
    assert found.delta == delta


def test_a_prompt_by_hand():
    """Two slices of 1 by 2 tokens; the whole image's three tokens are spread over four columns."""
    ids, grids = prompt([((1, 3), (1, 2), (1, 2), [1, 1])])
    found = canvas_positions([*ids, 2], IMAGE, grids, TAGS)
    assert found.prompt.tolist() == [
        [0, 1, *[2] * 13, 7],
        [0, 1, 1, *[2] * 3, 3, *[2] * 8, 7],
        [0, 1, 1, 2, 4, 5, 6, 2, 2, 3, 3, 4, 4, 5, 5, 7],
    ]
    assert found.forward_ids == (START,)


@pytest.mark.parametrize("grids", [[], [(1, 2)], [(2, 2)], [(1, 3), (1, 1)]])
def test_image_tokens_without_a_grid_are_rejected(grids):
    with pytest.raises(RequestError, match="image tokens"):
        canvas_positions([1, START, IMAGE, IMAGE, IMAGE, END], IMAGE, grids, TAGS)
