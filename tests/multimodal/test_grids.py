"""Arrays of patch grids equal transformers', and their sizes are linear in the patches."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from edgellm.core import graph_io
from edgellm.core.errors import RequestError
from edgellm.core.model_spec import VisionSpec
from edgellm.multimodal.patch_grid import grid_inputs, patch_positions

GRIDS = [(2, 2), (2, 18), (10, 2), (8, 8), (16, 24), (14, 22), (30, 6), (50, 34)]


def _spec(**changes: object) -> VisionSpec:
    facts = {
        "model_type": "test", "hidden_size": 48, "patch_size": 14, "merge_size": 2,
        "temporal_patch_size": 2, "window_size": 8, "position_grid": 48, "num_deepstack": 0,
        "image_size": 0, "tokens_per_tile": 0, "num_parameters": 0,
    }  # fmt: skip
    return VisionSpec(**{**facts, **changes})


@pytest.mark.parametrize("merge", [1, 2])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_positions_equal_transformers(grid, merge):
    import torch
    from transformers.vision_utils import (
        get_vision_interpolation_indices_and_weights,
        get_vision_position_ids,
    )

    inputs = grid_inputs(*grid, _spec(merge_size=merge))
    sizes = torch.tensor([[1, *grid]])
    expected = get_vision_position_ids(sizes, merge).numpy()
    np.testing.assert_array_equal(inputs[graph_io.PATCH_POSITIONS], expected)
    index, weight = get_vision_interpolation_indices_and_weights(
        sizes, 48, "bilinear", align_corners=True, spatial_merge_size=merge
    )
    np.testing.assert_array_equal(inputs[graph_io.POS_EMBED_INDEX], index.numpy().T)
    np.testing.assert_allclose(inputs[graph_io.POS_EMBED_WEIGHT], weight.numpy().T, atol=1e-6)


@pytest.mark.parametrize("grid", [(4, 6), (16, 16), (2, 40), (50, 18), (16, 8)], ids=str)
def test_positions_with_antialiasing_are_those_of_torch(grid):
    import torch

    table = np.random.default_rng(0).standard_normal((16 * 16, 5)).astype(np.float32)
    spec = _spec(window_size=0, position_grid=16, antialiases_positions=True)
    inputs = grid_inputs(*grid, spec)
    found = inputs[graph_io.POS_EMBED_SHARES] @ table
    planes = torch.from_numpy(table.T.reshape(1, 5, 16, 16).copy())
    how = {"mode": "bilinear", "align_corners": False, "antialias": True}
    wanted = torch.nn.functional.interpolate(planes, size=grid, **how)[0].numpy()
    assert len(inputs) == 1
    rows, columns = patch_positions(*grid, spec.merge_size).T
    np.testing.assert_allclose(found, wanted[:, rows, columns].T, atol=1e-5)


@pytest.mark.parametrize("side", [5, 16, 70])
@pytest.mark.parametrize("grid", [(4, 8), (32, 32), (20, 52), (24, 44), (4, 96)], ids=str)
def test_nearest_positions_equal_transformers(grid, side):
    import torch
    from transformers.vision_utils import get_vision_nearest_position_ids

    spec = _spec(merge_size=4, window_size=0, position_grid=side, has_nearest_positions=True)
    inputs = grid_inputs(*grid, spec)
    wanted = get_vision_nearest_position_ids(torch.tensor([grid]), side).numpy().reshape(grid)
    rows, columns = patch_positions(*grid, spec.merge_size).T
    assert {name: array.shape for name, array in inputs.items()} == {
        graph_io.POS_EMBED_INDEX: (1, math.prod(grid))
    }
    np.testing.assert_array_equal(inputs[graph_io.POS_EMBED_INDEX][0], wanted[rows, columns])


@pytest.mark.parametrize("side", [6, 32])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_exchanged_positions_equal_transformers(grid, side):
    """Rows of patches read the rows of a table with exchanged sides."""
    import torch
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights

    spec = _spec(window_size=0, position_grid=side, exchanges_positions=True)
    inputs = grid_inputs(*grid, spec)
    index, weight = get_vision_interpolation_indices_and_weights(
        torch.tensor([[1, grid[1], grid[0]]]), side, padding="zeros"
    )
    rows, columns = patch_positions(*grid, spec.merge_size).T
    places = rows * grid[1] + columns
    np.testing.assert_array_equal(inputs[graph_io.POS_EMBED_INDEX], index.numpy()[places].T)
    np.testing.assert_allclose(
        inputs[graph_io.POS_EMBED_WEIGHT], weight.numpy()[places].T, atol=1e-6
    )


@pytest.mark.parametrize("window", [4, 6, 8])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_windows_equal_transformers(grid, window):
    """Transformers sorts blocks by window and marks where windows end; the groups must be equal."""
    import torch
    from transformers.vision_utils import get_vision_window_index

    inputs = grid_inputs(*grid, _spec(window_size=window))
    slots, mask = inputs[graph_io.WINDOW_SLOTS], inputs[graph_io.WINDOW_MASK]
    found = [set(row[real]) for row, real in zip(slots.reshape(mask.shape), mask, strict=True)]
    blocks, ends = get_vision_window_index(
        torch.tensor([[1, *grid]]), spatial_merge_size=2, window_size=14 * window, patch_size=14
    )
    patches = (blocks[:, None] * 4 + torch.arange(4)).flatten().numpy()
    expected = [set(patches[begin:end]) for begin, end in itertools.pairwise(ends)]
    assert found == expected
    # Round trip: every patch is in its slot.
    np.testing.assert_array_equal(slots[inputs[graph_io.WINDOW_ROWS]], np.arange(np.prod(grid)))
    assert mask.ravel()[inputs[graph_io.WINDOW_ROWS]].all()
    assert ((slots >= 0) & (slots < np.prod(grid))).all()


def test_arrays_of_a_large_image_are_linear_in_its_patches():
    """1080p has 78 by 138 patches: nothing is near 10764 squared."""
    import tracemalloc

    def cost(rows: int, columns: int) -> tuple[int, int]:
        tracemalloc.start()
        inputs = grid_inputs(rows, columns, _spec())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return sum(array.nbytes for array in inputs.values()), peak

    inputs = grid_inputs(78, 138, _spec())
    assert {name: array.shape for name, array in inputs.items()} == {
        graph_io.PATCH_POSITIONS: (10764, 2),
        graph_io.WINDOW_SLOTS: (180 * 64,),
        graph_io.WINDOW_MASK: (180, 64),
        graph_io.WINDOW_ROWS: (10764,),
        graph_io.POS_EMBED_INDEX: (4, 10764),
        graph_io.POS_EMBED_WEIGHT: (4, 10764),
    }
    (small, small_peak), (large, large_peak) = cost(40, 64), cost(160, 256)  # 16 times
    assert large == 16 * small
    assert large_peak < 17 * small_peak < 17 * 500 * 40 * 64


def test_types_are_those_of_the_contract():
    inputs = grid_inputs(6, 10, _spec())
    kinds = {
        array.dtype
        for name, array in inputs.items()
        if name not in (graph_io.WINDOW_MASK, graph_io.POS_EMBED_WEIGHT)
    }
    assert kinds == {np.dtype(np.int64)}
    assert inputs[graph_io.WINDOW_MASK].dtype == np.bool_
    assert inputs[graph_io.POS_EMBED_WEIGHT].dtype == np.float32


def test_only_inputs_of_the_encoder_are_computed():
    assert set(grid_inputs(4, 4, _spec(window_size=0, position_grid=0))) == {
        graph_io.PATCH_POSITIONS
    }
    assert not grid_inputs(0, 0, _spec(image_size=448, tokens_per_tile=256))


@pytest.mark.parametrize("grid", [(0, 4), (4, 0), (3, 4), (4, 5)])
def test_indivisible_grids_are_rejected(grid):
    with pytest.raises(RequestError, match="does not divide into blocks of 2 by 2"):
        grid_inputs(*grid, _spec())
