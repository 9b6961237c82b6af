"""Passes of an encoder of images or audio: one image or clip at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.graph_roles import ENCODER
from edgellm.core.manifest import EncoderSpec, Engine
from edgellm.device_runtime import runners
from edgellm.device_runtime.arrays import F32
from edgellm.device_runtime.runners.pass_timing import Budget
from edgellm.device_runtime.runners.runner import Runner


class EncoderNetwork:
    """A loaded encoder."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def encode(self, inputs: Mapping[str, NDArray]) -> tuple[F32, F32]:
        """Encode one image or clip.

        Args:
            inputs: those of the encoder's graph by contract name.

        Returns:
            `image_embeds` or `audio_embeds` float32 [N, H], and `deepstack_embeds` float32
            [L, N, H]; L may be 0.
        """
        found = self._runner.run(inputs)
        names = graph_io.IMAGE_EMBEDS, graph_io.AUDIO_EMBEDS
        embeds = next(found[name] for name in names if name in found).copy()
        if graph_io.DEEPSTACK_EMBEDS in found:
            return embeds, found[graph_io.DEEPSTACK_EMBEDS].copy()
        return embeds, np.zeros((0, *embeds.shape), np.float32)


def open_encoder(folder: Path, engine: Engine) -> EncoderNetwork:
    """Load an engine of an encoder; raises as `runners.Backend.open_engine`."""
    opened = runners.find(engine.backend).open_engine(folder, engine)
    return EncoderNetwork(opened[ENCODER])


def network(opened: Mapping[str, Runner], spec: EncoderSpec, capacity: int) -> EncoderNetwork:
    """See `networks.Module`."""
    del spec, capacity
    return EncoderNetwork(opened[ENCODER])


def costs(
    network: EncoderNetwork, spec: EncoderSpec, max_rows: int = 0, budget: Budget | None = None
) -> dict[str, dict[str, float]]:
    """See `networks.Module`: empty, since costs of encoders are not used."""
    del network, spec, max_rows, budget
    return {}
