"""Encoded images and clips of a request: cache, checks of encoders, rows of a prompt."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from edgellm.core.errors import BrokenArtifactError, RequestError
from edgellm.core.manifest import ENCODER_HASH, Engine
from edgellm.core.model_spec import DecoderSpec
from edgellm.device_runtime.arrays import F32, I64, ImageRows, RowKey
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.multimodal.positions import Grid

if TYPE_CHECKING:
    from edgellm.multimodal.processors import PlacesImages  # imports Pillow

CACHE_BYTES = 256 << 20  # of features cached for later requests


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedItem:
    """An encoded image or clip, as input of the language model."""

    content: str  # hash of the pixels or samples
    embeds: F32  # [N, H]
    deepstack: F32  # [L, N, H]
    runs: tuple[Grid, ...] = ()  # grids of its tokens, for M-RoPE

    @property
    def num_bytes(self) -> int:
        """Size of the features."""
        return self.embeds.nbytes + self.deepstack.nbytes


Item = TypeVar("Item", bound=EncodedItem)


class EncodedCache(Generic[Item]):
    """Encoded items by key; the least recently used are evicted."""

    def __init__(self, num_bytes: int) -> None:
        self._kept: OrderedDict[str, Item] = OrderedDict()
        self._room = num_bytes

    def find(self, key: str) -> Item | None:
        """The item of a key, which becomes the newest; None if there is none."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def keep(self, item: Item) -> Item:
        """Add an item, and evict the oldest until it fits; the newest always stays."""
        self._kept[item.content] = item
        used = sum(kept.num_bytes for kept in self._kept.values())
        while used > self._room and len(self._kept) > 1:
            used -= self._kept.popitem(last=False)[1].num_bytes
        return item


def placed_prompt(
    token_ids: Sequence[int],
    decoder: DecoderSpec,
    *,
    images: Sequence[EncodedItem] = (),
    clips: Sequence[EncodedItem] = (),
    placing: PlacesImages | None = None,
) -> Prompt:
    """The prompt with token ids and rows of images and clips for a network.

    Args:
        token_ids: with a token for each row.
        decoder: of the network.
        images: in the order of the prompt.
        clips: likewise.
        placing: the processor of the images, if the decoder has M-RoPE.

    Raises:
        RequestError: the image or audio tokens do not match the items.
    """
    spec, ids = decoder.images, np.asarray(token_ids, np.int64)
    assert spec is not None
    items = [*images, *clips]
    seen = _places(ids, spec.token_id, images, "image", "images")
    heard = _places(ids, spec.audio_token_id, clips, "audio", "clips")
    if not items:
        return Prompt([*token_ids])
    positions, keys = None, dict[int, RowKey]()
    if decoder.position_axes == 3 and images:
        assert spec.token_id is not None
        assert placing is not None
        grids = [run for one in images for run in one.runs]
        found = placing.positions(ids, spec.token_id, grids)
        positions = found.prompt
        # Without images these tokens have other positions
        keys = {token: f"{token} before an image" for token in found.forward_ids}
    places = np.concatenate([seen, heard])
    order = np.argsort(places)
    ids[places[order]] = decoder.vocab_size + np.arange(len(places))
    contents = [one.content for one in items for _ in one.embeds]
    keys |= {decoder.vocab_size + at: contents[index] for at, index in enumerate(order)}
    rows = ImageRows(
        embeds=np.concatenate([one.embeds for one in items])[order],
        deepstack=np.concatenate([one.deepstack for one in items], axis=1)[:, order],
        positions=positions,
        keys=keys,
        spans=_runs(seen) if spec.bidirectional_tokens and len(seen) else (),
    )
    return Prompt(ids.tolist(), rows)


def _places(
    ids: I64, token_id: int | None, items: Sequence[EncodedItem], token: str, names: str
) -> I64:
    """Positions of the items' tokens; none are placed by a reader that is not loaded."""
    if token_id is None:
        return np.zeros(0, np.int64)
    places, count = np.flatnonzero(ids == token_id), sum(len(one.embeds) for one in items)
    if len(places) != count:
        raise RequestError(
            f"the prompt has {len(places)} {token} tokens, its {names} have {count}",
            hint=f"the text must not contain {token} tokens",
        )
    return places


def _runs(places: I64) -> tuple[tuple[int, int], ...]:
    """First and after the last of each run of consecutive numbers, ascending."""
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    return tuple((int(run[0]), int(run[-1]) + 1) for run in runs)


def contradictions(folder: Path, encoder: Engine, encoder_hash: str | None) -> list[str]:
    """Warn of an encoder of another checkpoint, which may be intended."""
    own = encoder.provenance.get(ENCODER_HASH)
    if own is None or encoder_hash in (None, own):  # engines of older bundles have no hash
        return []
    line = (
        f"{folder} was exported from another encoder than that of the engine's checkpoint: "
        "images or audio may be misread; export both from one checkpoint, unless the two are to "
        "be combined"
    )
    logging.getLogger(__name__).warning("warning: %s", line)
    return [line]


def require_match(folder: Path, encoder: Engine, decoder: DecoderSpec) -> None:
    """Check that an encoder's engine is of the decoder's model.

    Raises:
        BrokenArtifactError: it is not.
    """
    images, spec = decoder.images, encoder.encoder
    assert images is not None
    for what, of_decoder, of_encoder in (
        ("model", images.model_type, spec.model_type),
        ("hidden size", decoder.hidden_size, spec.hidden_size),
    ):
        if of_decoder != of_encoder:
            raise other_model(folder, what, of_encoder, of_decoder)


def other_model(
    folder: Path, what: str, of_encoder: object, of_decoder: object
) -> BrokenArtifactError:
    """The error of an encoder whose facts differ from the decoder's."""
    return BrokenArtifactError(
        f"{folder} is the encoder of another model: {what} {of_encoder}, the engine "
        f"has {of_decoder}",
        hint="give the engine of the encoder that was exported from the same checkpoint",
    )
