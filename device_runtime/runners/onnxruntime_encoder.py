"""Runs of a visual encoder: one image at a time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnxruntime as ort

from edgellm import contract
from edgellm.device_runtime.runners.onnxruntime_graphs import run_arrays
from edgellm.device_runtime.session import F32


class OnnxRuntimeVisualSession:
    """An encoder's graph."""

    def __init__(self, graph: ort.InferenceSession) -> None:
        self._graph = graph

    def encode(self, inputs: Mapping[str, np.ndarray]) -> tuple[F32, F32]:
        """See `edgellm.device_runtime.session.VisualSession.encode`."""
        found = run_arrays(self._graph, inputs)
        embeds = found[contract.IMAGE_EMBEDS]
        none = np.zeros((0, *embeds.shape), np.float32)
        return embeds, found.get(contract.DEEPSTACK_EMBEDS, none)
