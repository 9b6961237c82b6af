"""Medusa heads on ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from edgellm import contract
from edgellm.device_runtime.runners.onnxruntime_graphs import run_arrays
from edgellm.device_runtime.session import F32, I64


class OnnxRuntimeHeads:
    """See `edgellm.device_runtime.session.HeadsSession`."""

    def __init__(self, graph: ort.InferenceSession) -> None:
        self._graph = graph

    def candidates(self, feature: F32, top_k: int) -> tuple[I64, F32]:
        """See `edgellm.device_runtime.session.HeadsSession.candidates`."""
        feed = {contract.HIDDEN_TAPS: feature[None, None], contract.TOP_K: np.array([top_k])}
        found = run_arrays(self._graph, feed)
        return found[contract.CANDIDATE_IDS][0], found[contract.CANDIDATE_LOG_PROBS][0]
