"""Runs of a draft's exported graphs, compared with a reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from eagle_reference import BASE_HIDDEN, VOCAB, tree_mask

from edgellm.core import graph_io
from edgellm.core.manifest import Bundle

TOLERANCE = 2e-4
CAPACITY, K = 24, 6


@dataclass
class DraftRun:
    """The exported graphs with a cache."""

    folder: Path
    manifest: Bundle
    cache: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kv = self.manifest.draft.decoder.kv
        shape = (1, kv.num_kv_heads, CAPACITY, kv.head_dim)
        for layer in range(kv.num_layers):
            for part in ("key", "value"):
                self.cache[graph_io.past_name(layer, part)] = np.zeros(shape, kv.dtype)
        self.model = self._open("model")

    def _open(self, name: str):
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 3
        # INT4 weights with float activations, not with int8 ones.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        path = str(self.folder / f"{name}.onnx")
        return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        taps = taps.numpy().astype(self.manifest.dtype)[None]
        (hidden,) = self._open("fuse").run([graph_io.DRAFT_HIDDEN], {graph_io.HIDDEN_TAPS: taps})
        return torch.from_numpy(hidden[0].astype(np.float32))

    def forward(self, ids, hidden, positions, mask, write_index, rows) -> list[np.ndarray]:
        """Candidates, log-probabilities and recycled rows of `rows`."""
        feed = {
            graph_io.INPUT_IDS: ids.numpy()[None],
            graph_io.DRAFT_HIDDEN: hidden.numpy().astype(self.manifest.dtype)[None],
            graph_io.POSITION_IDS: positions.numpy()[None],
            graph_io.WRITE_INDEX: np.array([write_index]),
            graph_io.TREE_MASK: np.asarray(mask),
            graph_io.LOGITS_INDEX: np.asarray(rows),
            graph_io.TOP_K: np.array([K]),
            **self.cache,
        }
        names = [value.name for value in self.model.get_outputs()]
        assert names[:3] == [
            graph_io.CANDIDATE_IDS,
            graph_io.CANDIDATE_LOG_PROBS,
            graph_io.RECYCLED_HIDDEN,
        ]
        (*outputs,) = self.model.run(names, feed)
        self.cache = dict(zip(self.cache, outputs[3:], strict=True))
        return [output[0] for output in outputs[:3]]


def _compare(run, reference, ids, hidden, positions, mask, rows=None, tolerance=TOLERANCE):
    """One pass through both; returns the reference's recycled rows."""
    write_index = len(reference.cache[0][0])
    rows = list(range(len(ids))) if rows is None else rows
    found = run.forward(ids, hidden, positions, mask, write_index, rows)
    log_probs, recycled = reference.forward(ids, hidden, positions, torch.as_tensor(mask))
    best = log_probs[rows].topk(K)
    np.testing.assert_allclose(found[1], best.values, atol=tolerance)
    np.testing.assert_allclose(found[2], recycled[rows], atol=tolerance, rtol=tolerance)
    assert found[1].dtype == np.float32
    if tolerance == TOLERANCE:
        np.testing.assert_array_equal(found[0], reference.targets[best.indices])
    return recycled


def drive(run, reference, tolerance=TOLERANCE) -> None:
    """A prefill, an extension, and two levels of a tree over recycled rows, in both ways."""
    layout = reference.layout
    random = torch.Generator().manual_seed(3)
    width = BASE_HIDDEN * (1 if layout.eagle1 else len(layout.taps))
    features = torch.randn(10, width, generator=random) * 2
    ids = torch.randint(VOCAB, (15,), generator=random)
    if layout.mask_shape:
        features[[4, 9]] = 0
    hidden = features if layout.eagle1 else reference.fuse(features)
    if not layout.eagle1:
        np.testing.assert_allclose(run.fuse(features), hidden, atol=tolerance, rtol=tolerance)
    positions = torch.arange(10)
    _compare(run, reference, ids[:7], hidden[:7], positions[:7], np.tri(7, dtype=bool),
             tolerance=tolerance)  # fmt: skip
    recycled = _compare(run, reference, ids[7:10], hidden[7:], positions[7:],
                        np.tri(3, dtype=bool), tolerance=tolerance)  # fmt: skip
    level = _compare(run, reference, ids[10:12], recycled[[2, 2]], torch.tensor([10, 10]),
                     np.eye(2, dtype=bool), tolerance=tolerance)  # fmt: skip
    parents = [-1, -1, 0, 0, 1]
    mask, depth = tree_mask(parents), torch.tensor([10, 10, 11, 11, 11])
    below = level[[0, 0, 1]]
    # The next level alone, under a mask that also rules the level before.
    _compare(run, reference, ids[12:15], below, depth[2:], mask[2:], [0, 2], tolerance)
    # The same level together with its ancestors, over the slots that all of them had.
    reference.drop_to(10)
    hidden = torch.cat([recycled[[2, 2]], below])
    _compare(run, reference, ids[10:15], hidden, depth, mask, [2, 3, 4], tolerance)
