"""Medusa heads: one pass whose sizes are all known, a CUDA graph from its second run on."""

from __future__ import annotations

from edgellm import contract
from edgellm.device_runtime.runners.tensorrt.bound_pass import PassRunner
from edgellm.device_runtime.runners.tensorrt.device import Device, Engine
from edgellm.device_runtime.runners.tensorrt.packed_buffers import packed_bytes
from edgellm.device_runtime.runners.tensorrt.session import require_candidates
from edgellm.device_runtime.session import F32, I64

_RESULTS = contract.CANDIDATE_IDS, contract.CANDIDATE_LOG_PROBS


class TensorRtHeads:
    """See `edgellm.device_runtime.session.HeadsSession`."""

    def __init__(self, engine: Engine, device: Device) -> None:
        """Allocate; raises `LimitError` if the device is too small."""
        inputs, results = (
            {name: (engine.tensors[name].shape, engine.tensors[name].dtype) for name in names}
            for names in ((contract.HIDDEN_TAPS,), _RESULTS)
        )
        self._width = engine.tensors[contract.CANDIDATE_IDS].shape[-1]
        self._passes = PassRunner(engine, device, {}, packed_bytes(inputs), packed_bytes(results))
        self._pass = self._passes.bind(inputs, results, {}, keep=True)

    def candidates(self, feature: F32, top_k: int) -> tuple[I64, F32]:
        """See `edgellm.device_runtime.session.HeadsSession.candidates`.

        Raises:
            LimitError: the engine gives fewer candidates than `top_k`.
        """
        require_candidates(top_k, self._width)
        self._pass.inputs[contract.HIDDEN_TAPS][0, 0] = feature
        self._pass.run()
        ids, log_probs = (self._pass.outputs[name][0, :, :top_k].copy() for name in _RESULTS)
        return ids, log_probs
