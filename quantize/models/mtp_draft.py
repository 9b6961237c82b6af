"""An MTP layer to quantize: it reads the final hidden states of its base.

It is calibrated as an EAGLE-1 draft, with the inputs of its first two steps. The layer has the
structure of the base's attention layers. Embedding and head are the base's, and stay float.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from edgellm.export.checkpoints.checkpoint import Checkpoint, TensorSource
from edgellm.export.draft_checkpoints.config import DraftConfig, Norms
from edgellm.export.drafts.mtp import MtpConfig, all_tensors, own_tensors
from edgellm.quantize.formats.modelopt import F32
from edgellm.quantize.formats.tensors import Tensor, read_below, read_tensor
from edgellm.quantize.models.checks import EMBEDDING, HEAD
from edgellm.quantize.models.draft_inputs import Inputs
from edgellm.quantize.models.eagle_draft import Draft
from edgellm.quantize.models.experts import read_canonical
from edgellm.quantize.models.families import Family
from edgellm.quantize.models.language_model import Ids, LanguageModel
from edgellm.quantize.models.one_layer_model import head_model, layer_model


@dataclass(frozen=True, kw_only=True)
class MtpDraft(Draft):
    """A float MTP layer with its float base."""

    mtp: MtpConfig

    @property
    def float_modules(self) -> tuple[str, ...]:
        """See `QuantizedNetwork`."""
        return "model.embed_tokens", "lm_head", self.mtp.names.fc

    @classmethod
    def of(cls, checkpoint: Checkpoint, mtp: MtpConfig, base: LanguageModel) -> MtpDraft:
        """Return the draft; `checkpoint` may contain the whole model."""
        decoder = mtp.decoder
        facts = DraftConfig(
            method="eagle",
            exporter=mtp.exporter,
            decoder=decoder,
            draft_vocab_size=decoder.vocab_size,
            base_hidden_size=decoder.hidden_size,
            base_num_layers=mtp.base_num_layers,
            hidden_taps=mtp.hidden_taps,
            taps_meaning=mtp.taps_meaning,
            first_layer=mtp.names.layer,
            qk_norm=True,
            fc_bias=False,
            norms=Norms(before_residual=False, before_fc=False, fc_norm=False, output=True),
            mask_rows=None,
        )
        own = replace(checkpoint, tensors=own_tensors(checkpoint.tensors), tokenizer_files={})
        return cls(checkpoint=own, facts=facts, base=base, mtp=mtp)

    @property
    def family(self) -> Family:
        """The base's family."""
        return self.base.family

    @cached_property
    def _tensors(self) -> TensorSource:
        return all_tensors(self.checkpoint, self.base.whole, self.mtp)

    @property
    def layers(self) -> tuple[str, ...]:
        """See `QuantizedNetwork`."""
        return (f"{self.mtp.names.layer}.",)

    @property
    def embedding_name(self) -> str:
        """See `Draft`."""
        return EMBEDDING

    @property
    def head_name(self) -> str:
        """The head's name; the embedding's, if tied."""
        return HEAD if HEAD in self.tensors.infos() else EMBEDDING

    def layer_source(self, index: int) -> dict[str, Tensor]:
        """See `QuantizedNetwork`."""
        return read_canonical(read_below(self.tensors, self.layers[index]), self.family)

    def layer_model(
        self, index: int, tensors: Mapping[str, F32], device: torch.device
    ) -> PreTrainedModel:
        """See `QuantizedNetwork`; as the base's first attention layer."""
        del index
        kinds = self.base.config.layer_kinds
        attends = next(at for at, kind in enumerate(kinds) if kind is not None)
        return layer_model(self._config(attends), attends, tensors, device)

    def _config(self, attends: int) -> dict[str, Any]:
        """Return the base's config; a Qwen layer gets experts if its tensors have some."""
        config = self.base.checkpoint.config
        if self.family.experts is None or self.mtp.names.shares_norm:
            return config
        dense = [] if any(".experts." in name for name in self.tensors.infos()) else [attends]
        return {**config, "mlp_only_layers": dense, "decoder_sparse_step": 1}

    def norm_model(self, head: F32 | None, device: torch.device) -> PreTrainedModel:
        """Return the norm after the layer, and the base's head."""
        norm = {"weight": read_tensor(self.tensors, f"{self.mtp.names.norm}.weight").floats()}
        return head_model(self.base.checkpoint.config, norm, head, device)

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """See `QuantizedNetwork`."""
        return self.base.finish(logits)

    def states_shape(self, rows: Ids, layer: int) -> tuple[int, int, int]:
        """Return the shape of both steps."""
        return super().states_shape(rows, layer + 1)  # the input has no attention part

    def inputs(self, device: torch.device) -> Inputs:
        """See `Draft`."""
        return _MtpInputs(self, device)


class _MtpInputs:
    """The modules before an MTP layer; both halves of fc's input are normed."""

    def __init__(self, draft: MtpDraft, device: torch.device) -> None:
        def read(name: str) -> torch.Tensor:
            values = read_tensor(draft.tensors, f"{name}.weight").floats()
            return torch.from_numpy(values.copy()).to(device)

        names, shift = draft.mtp.names, draft.family.norm_shift
        self._tokens, self._hidden = read(names.embedding_norm), read(names.hidden_norm)
        self._tokens, self._hidden = self._tokens + shift, self._hidden + shift
        self._fc, self._epsilon = read(names.fc), draft.config.rms_norm_eps
        self._divisor = read(names.norm) if names.shares_norm else 1.0

    def fuse(self, taps: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the base's normed hidden states."""
        return taps[0]

    def join(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Join embeddings and hidden states, each [B, S, H], to [B, S, H]."""
        both = (
            self._normed(tokens, self._tokens),
            self._normed(hidden / self._divisor, self._hidden),
        )
        return torch.nn.functional.linear(torch.cat(both, -1), self._fc)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, self._epsilon)
