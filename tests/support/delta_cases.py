"""Random inputs of linear attention, and the recurrence row by row in torch, in float64."""

from __future__ import annotations

import numpy as np
import torch

HEADS, VALUES = 4, 21
SHAPES = {"one": (2, 24, 1), "channels": (2, 24, 24), "odd": (4, 19, 19)}  # J, dk and C


class DeltaCase:
    """Random inputs of a rule, in float64 for the recurrence."""

    def __init__(self, kind: str, parents: list[int], states: int = 1) -> None:
        random = torch.Generator().manual_seed(3)
        self.key_heads, self.keys, self.decays = SHAPES[kind]
        self.parents, rows = parents, len(parents)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random).double()

        self.q, self.k = (normal(rows, self.key_heads, self.keys) / 4 for _ in range(2))
        self.v, self.b = normal(rows, HEADS, VALUES), normal(rows, HEADS).sigmoid()
        self.g = -(2 * normal(rows, HEADS, self.decays)).exp()  # also far below what exp can hold
        self.state = normal(states, HEADS, self.keys, VALUES)

    def feeds(self, *names: str) -> dict[str, np.ndarray]:
        given = {
            name: getattr(self, name).reshape(1, len(self.parents), -1).float().numpy()
            for name in names
            if name not in ("state", "parents")
        }
        given |= {"state": self.state.float().numpy()} if "state" in names else {}
        return given | ({"parents": np.array(self.parents)} if "parents" in names else {})

    def expected(self, *, with_delta: bool = True) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
        """Outputs and deltas [1, S, H * dv], and the last row's state."""
        matrices, outputs, deltas = [], [], []
        for row, parent in enumerate(self.parents):
            before = self.state[-1 - parent] if parent < 0 else matrices[parent]
            q, k = (x[row].repeat_interleave(HEADS // self.key_heads, 0) for x in (self.q, self.k))
            kept = before * self.g[row].exp()[..., None]
            delta = self.v[row]
            if with_delta:
                known = torch.einsum("hkv,hk->hv", kept, k)
                delta = self.b[row][:, None] * (delta - known)
            matrices.append(kept + k[..., None] * delta[:, None])
            outputs.append(torch.einsum("hkv,hk->hv", matrices[-1], q))
            deltas.append(delta)
        shape = 1, len(outputs), -1
        both = (torch.stack(each).reshape(shape).numpy() for each in (outputs, deltas))
        return *both, matrices[-1]
