"""Medusa heads on ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from edgellm import contract
from edgellm.device_runtime.session import F32, I64

_OUTPUTS = [contract.CANDIDATE_IDS, contract.CANDIDATE_LOG_PROBS]


class OnnxRuntimeHeads:
    """See `edgellm.device_runtime.session.HeadsSession`."""

    def __init__(self, graph: ort.InferenceSession) -> None:
        self._graph = graph

    def candidates(self, feature: F32, top_k: int) -> tuple[I64, F32]:
        """See `edgellm.device_runtime.session.HeadsSession.candidates`."""
        feed = {contract.HIDDEN_TAPS: feature[None, None], contract.TOP_K: np.array([top_k])}
        ids, log_probs = (np.asarray(output) for output in self._graph.run(_OUTPUTS, feed))
        return ids[0], log_probs[0]
