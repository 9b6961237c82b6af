"""Sequences of random chunks, tokens and trees, alone and in batches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgellm.core.model_spec import DecoderSpec
from edgellm.device_runtime.arrays import ImageRows
from edgellm.device_runtime.networks.decoder import DecoderNetwork, PassResult, SequencePart
from edgellm.device_runtime.networks.sequence_kv import SequenceKV

VOCABULARY, IMAGE_ROWS, PROMPT = 96, 40, 90


class Scripted:
    """A sequence of chunks, tokens and trees, and the logits of every position that stayed."""

    def __init__(
        self, seed: int, kv: SequenceKV, capacity: int, spec: DecoderSpec | None = None
    ) -> None:
        """`spec`: of a model whose images stand in pieces."""
        self.rng, self.kv, self.length = np.random.default_rng(seed), kv, 0
        self.capacity, self.seen = capacity, list[bytes]()
        self.shown = 0 if spec is not None else IMAGE_ROWS  # image embeddings that were prefilled
        if spec is not None:
            self.kv.images = random_images(spec, seed)

    def part(self) -> SequencePart:
        """Return the next part to compute."""
        rng, maximum = self.rng, self.capacity - self.length
        kind = rng.choice(["piece", "token", "token", "tree"])
        size = {"piece": rng.integers(2, 40), "token": 1, "tree": rng.integers(2, 13)}[kind]
        size = int(min(size, maximum))
        ids = rng.integers(9, VOCABULARY, size)
        self.path = np.arange(size)
        if kind != "tree":
            own = np.arange(self.shown, min(self.shown + size // 2, IMAGE_ROWS))
            ids[size // 4 : size // 4 + len(own)] = VOCABULARY + own
            self.shown += len(own)
            return SequencePart(self.kv, ids, self.length, np.arange(size))
        mask = np.eye(size, dtype=np.bool_)
        for node in range(1, size):
            mask[node] |= mask[int(rng.integers(node))]
        self.path = np.flatnonzero(mask[int(rng.integers(size))])
        positions = self.length + mask.sum(1) - 1
        return SequencePart(self.kv, ids, self.length, np.arange(size), positions, mask)

    def take(self, part: SequencePart, result: PassResult) -> None:
        self.seen.append(result.logits.tobytes())
        if part.tree_mask is not None:
            self.kv.compact(self.length, self.path)
        self.length += len(self.path)

    @property
    def is_over(self) -> bool:
        return self.length >= self.capacity - 1


def random_images(spec: DecoderSpec, seed: int) -> ImageRows:
    """Image embeddings, and positions of a prompt that differ on all axes."""
    rng = np.random.default_rng(seed)
    assert spec.images is not None
    positions = None
    if spec.position_axes > 1:
        positions = np.sort(rng.integers(0, PROMPT, (spec.position_axes, PROMPT)), axis=1)
        positions[:, 0] = 0
    shape = IMAGE_ROWS, spec.hidden_size
    return ImageRows(
        embeds=rng.standard_normal(shape, np.float32),
        deepstack=rng.standard_normal((spec.images.num_deepstack, *shape), np.float32),
        positions=positions,
        keys={VOCABULARY + row: f"{seed}" for row in range(IMAGE_ROWS)},
    )


def run_together(
    session: DecoderNetwork, make: Callable[[int], Scripted], count: int, rng: np.random.Generator
) -> None:
    """Run `count` sequences in a random order, and each alone: the bits must be equal.

    More sequences than the batch size, or than the KV blocks can hold.
    """
    everyone = [make(at) for at in range(count)]
    running = list(everyone)
    while running:
        some = list(rng.permutation(running))[: int(rng.integers(1, session.max_batch_size + 1))]
        parts = [one.part() for one in some]
        for one, part, result in zip(some, parts, session.run_batch(parts), strict=True):
            one.take(part, result)
        running = [one for one in running if not one.is_over]
    for one in everyone:
        one.kv.free()
    for at, one in enumerate(everyone):
        alone = make(at)
        while not alone.is_over:
            part = alone.part()
            (result,) = session.run_batch([part])
            alone.take(part, result)
        assert alone.seen == one.seen
        alone.kv.free()
