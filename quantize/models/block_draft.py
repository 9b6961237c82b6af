"""A block draft to quantize: its layers predict tokens at mask tokens.

A sample of the calibration text gives the states of `block_layer`: the base's fused hidden states,
then blocks, each with a first token of the text. The draft's logits are measured without the tables
of DSpark and DFlash2, which depend on the previous token and stay float.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from edgellm.core.errors import EdgeLLMError
from edgellm.export.draft_checkpoints.block_config import CONFIDENCE, MARKOV, SELECTOR, BlockConfig
from edgellm.quantize.calibration.hidden_states import States
from edgellm.quantize.formats.modelopt import F32
from edgellm.quantize.formats.tensors import Tensor, read_below, read_tensor
from edgellm.quantize.models.block_layer import (
    CONVOLUTIONS,
    Places,
    block_head_model,
    block_layer_model,
)
from edgellm.quantize.models.draft_inputs import fused_features
from edgellm.quantize.models.eagle_draft import EMBEDDING, NORM, Draft
from edgellm.quantize.models.families import Family
from edgellm.quantize.models.language_model import Ids, Task, embedded
from edgellm.quantize.models.lm_head import Head, greedy
from edgellm.quantize.models.one_layer_model import run_layer


@dataclass(frozen=True, kw_only=True)
class BlockDraft(Draft):
    """A float block draft with the float base that it was trained for."""

    blocks: BlockConfig

    @property
    def float_modules(self) -> tuple[str, ...]:
        """See `QuantizedNetwork`."""
        return (*super().float_modules, MARKOV, SELECTOR, CONFIDENCE)

    @property
    def family(self) -> Family:
        """The family, with the norms that only linear layers read."""
        family = super().family
        norms = () if self.blocks.convolution else ("post_attention_layernorm",)
        floats = tuple(f"{name}.kernel_projection" for name in CONVOLUTIONS)
        return replace(
            family,
            readers={norm: family.readers[norm] for norm in norms},
            floats=floats if self.blocks.convolution else (),
        )

    @property
    def layers(self) -> tuple[str, ...]:
        """See `QuantizedNetwork`."""
        return tuple(f"layers.{index}." for index in range(self.config.num_hidden_layers))

    def layer_source(self, index: int) -> dict[str, Tensor]:
        """See `QuantizedNetwork`."""
        found = read_below(self.tensors, self.layers[index])
        return {name: value for name, value in found.items() if not name.endswith("inv_freq")}

    def layer_model(
        self, index: int, tensors: Mapping[str, F32], device: torch.device
    ) -> PreTrainedModel:
        """See `QuantizedNetwork`."""
        window = self.window_of(index)
        return block_layer_model(self.layer_config, self.blocks, tensors, device, window)

    def norm_model(self, head: F32 | None, device: torch.device) -> PreTrainedModel:
        """Return the final norm and the head for positions that predict a token."""
        norm = {"weight": read_tensor(self.tensors, NORM).floats()}
        return block_head_model(self.layer_config, self.blocks, norm, head, device)

    def states_shape(self, rows: Ids, layer: int) -> tuple[int, int, int]:
        """Return the shape of hidden states of the text and its blocks."""
        del layer  # all layers are equal
        places = self._places(rows.shape[1])
        width = self.config.hidden_size
        return len(rows), places.text + places.count * places.size, width

    def _places(self, tokens: int) -> Places:
        size = self.blocks.block.size
        if tokens <= size:
            raise EdgeLLMError(
                f"--seq_len {tokens}: the draft's blocks have {size} tokens",
                hint=f"give {size + 1} or more, best a large multiple of {size}",
            )
        return Places.of_text(tokens, size)

    def first_steps(
        self, rows: Ids, base: Sequence[States] | Mapping[int, States], task: Task
    ) -> Iterator[torch.Tensor]:
        """Yield states [B, T, D] of each batch; see `Draft.first_steps`."""
        places = self._places(rows.shape[1])
        ids = np.full((len(rows), places.count, places.size), self.blocks.block.mask_token_id)
        ids[:, :, 0] = rows[:, places.firsts]
        table = read_tensor(self.tensors, EMBEDDING)
        taps = zip(*(base[tap].batches(task.device) for tap in self.taps), strict=True)
        blocks = embedded(table, ids.reshape(len(rows), -1), task.batch_rows)
        for tapped, own in zip(taps, blocks, strict=True):
            text = fused_features(self.tensors, self.facts, tapped)
            yield torch.cat([text, own.to(task.device)], 1)

    def targets_of(self, last: States, head: Head, task: Task) -> Ids:
        """Return the base's predictions at the positions of the blocks; see `Draft.targets_of`."""
        norm = self.base.norm_model(None, task.device)
        places = self._places(last.shape[1])
        skipped = int(not self.blocks.block.from_newest)
        # A position predicts its own token, or the next one if the newest position predicts too.
        before = places.tokens.reshape(-1, places.size)[:, skipped:].reshape(-1) - skipped
        found = [
            self.draft_ids[greedy(run_layer(norm, batch), head)][:, before]
            for batch in last.batches(task.device)
        ]
        return np.concatenate(found)

    def needed_bytes(self, batch_tokens: int, copies: int, *, with_head: bool) -> int:
        """See `QuantizedNetwork`; the blocks have as many tokens as the text."""
        return super().needed_bytes(2 * batch_tokens, copies, with_head=with_head)
