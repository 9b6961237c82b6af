"""The facts of Medusa heads (arXiv 2401.10774), which the tensors' names and shapes tell.

A head is residual blocks and a linear layer over the vocabulary: `{head}.{block}.linear.weight`,
`{head}.{block}.linear.bias`, then `{head}.{blocks}.weight`. The Medusa project stores them so, or
under `medusa_head.` beside the whole model; NVIDIA Model-Optimizer under `medusa_heads.`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from edgellm.contract import BrokenArtifactError, UnsupportedModelError
from edgellm.export.checkpoint import Checkpoint
from edgellm.export.config import ConfigReader
from edgellm.export.decoder_config import DecoderConfig

_NAME = re.compile(r"(medusa_heads?\.|)(\d+)\.(\d+)\.(weight|linear\.weight|linear\.bias)")
_PROJECTS = {"": "FasterDecoding", "medusa_head.": "FasterDecoding", "medusa_heads.": "ModelOpt"}


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """What Medusa heads compute and which base they were trained for."""

    exporter: str
    prefix: str  # of all tensors, with its dot
    num_heads: int
    num_blocks: int  # residual blocks of a head
    hidden_size: int  # of the base
    vocab_size: int
    base_num_layers: int
    max_positions: int  # of the base
    taps_meaning: str
    method: str = "medusa"

    @property
    def hidden_taps(self) -> tuple[int, ...]:
        """The output of the base's final norm, see `manifest.DraftSpec`."""
        return (self.base_num_layers,)


def is_medusa(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint holds Medusa heads, alone or beside a model."""
    return bool(head_names(checkpoint.tensors.infos()))


def head_names(names: Iterable[str]) -> list[str]:
    """Those of tensors of Medusa heads."""
    return [name for name in names if _NAME.fullmatch(name)]


def read_medusa(
    checkpoint: Checkpoint, base: DecoderConfig, ignored: tuple[str, ...] = ()
) -> MedusaConfig:
    """Read the heads' facts and check them against the base.

    Raises:
        UnsupportedModelError: config and tensors contradict each other, or another base's heads.
        BrokenArtifactError: heads or blocks between others are missing.
    """
    infos = checkpoint.tensors.infos()
    prefix, num_heads, num_blocks = _sizes(head_names(infos))
    reader = ConfigReader(checkpoint.config)
    said = reader.optional("medusa_num_heads", int)
    reader.expect("medusa_num_layers", num_blocks)
    reader.expect("version", "1", "2")
    reader.expect("hidden_size", base.hidden_size)
    reader.expect("vocab_size", base.vocab_size)
    if "num_hidden_layers" not in checkpoint.config:  # a whole model's is read with the base
        reader.finish(ignored)
    # Public configs name fewer heads than their files hold; more would be missing.
    if said is not None and said > num_heads:
        raise UnsupportedModelError(
            f"config.json: medusa_num_heads = {said}, but the weights hold {num_heads} heads",
            hint="the download is incomplete, or the config is of other weights",
        )
    _check_against(base, infos[f"{prefix}0.{num_blocks}.weight"].shape)
    meaning = "Medusa: output of the final norm"
    if said is not None and said < num_heads:
        meaning += f"; all {num_heads} heads that the weights hold, config.json says {said}"
    return MedusaConfig(
        exporter=_PROJECTS[prefix],
        prefix=prefix,
        num_heads=num_heads,
        num_blocks=num_blocks,
        hidden_size=base.hidden_size,
        vocab_size=base.vocab_size,
        base_num_layers=base.num_hidden_layers,
        max_positions=base.max_position_embeddings,
        taps_meaning=meaning,
    )


def _sizes(names: list[str]) -> tuple[str, int, int]:
    """Prefix, heads and blocks of a head."""
    matches = [match for name in names if (match := _NAME.fullmatch(name))]
    prefixes = {match[1] for match in matches}
    if len(prefixes) > 1:
        raise UnsupportedModelError(
            f"Medusa heads stand under several names: {', '.join(sorted(map(repr, prefixes)))}"
        )
    outputs = {int(match[2]): int(match[3]) for match in matches if match[4] == "weight"}
    heads = {int(match[2]) for match in matches}
    if heads != set(range(len(heads))) or outputs.keys() != heads:
        raise BrokenArtifactError(
            f"of {1 + max(heads)} Medusa heads, {len(outputs.keys() & heads)} have an output layer",
            hint="every head needs {head}.{blocks}.weight of [vocabulary, hidden size]",
        )
    if len(set(outputs.values())) > 1:
        raise UnsupportedModelError("the Medusa heads have different numbers of blocks")
    return prefixes.pop(), len(heads), outputs[0]


def _check_against(base: DecoderConfig, shape: tuple[int, ...]) -> None:
    """Refuse heads that were trained for another base."""
    hint = "give the base that the heads were trained for"
    for what, found, wanted in (
        ("vocabulary", shape[0], base.vocab_size),
        ("hidden size", shape[-1], base.hidden_size),
    ):
        if found != wanted:
            raise UnsupportedModelError(
                f"the Medusa heads are for a base of {what} {found}, this base has {wanted}",
                hint=hint,
            )
