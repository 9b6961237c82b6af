"""An EAGLE draft to quantize: its layers continue the hidden states of its base.

The float base runs over the calibration text, one layer at a time; its auxiliary hidden states are
stored. Each sample gives the draft two samples of inputs. The first has the base's hidden states,
as in a draft's first step. The second has the draft's own hidden states, as in its second step. S
tokens of a sample, H hidden size of the base, D of the draft.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from edgellm.export.checkpoints.checkpoint import Checkpoint, TensorSource
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.draft_checkpoints.config import DraftConfig
from edgellm.export.draft_checkpoints.low_rank_head import DOWN, UP
from edgellm.export.draft_checkpoints.tensors import complete, read_target_ids
from edgellm.export.pipeline.draft import DraftOptions, understand_draft
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.quantize.calibration.hidden_states import States
from edgellm.quantize.calibration.text import Calibration
from edgellm.quantize.formats.modelopt import F32
from edgellm.quantize.formats.tensors import Tensor, read_below, read_tensor
from edgellm.quantize.metrics.divergence import Targets
from edgellm.quantize.models.checks import HEAD, needed_bytes
from edgellm.quantize.models.draft_inputs import DraftInputs, Inputs
from edgellm.quantize.models.families import FAMILIES, Family
from edgellm.quantize.models.language_model import Ids, LanguageModel, Notify, Task, embedded
from edgellm.quantize.models.lm_head import Head, float_head, greedy
from edgellm.quantize.models.one_layer_model import draft_layer_model, head_model, run_layer
from edgellm.quantize.work_folder import FLOAT, QUANTIZED, WorkFolder

EMBEDDING, NORM = "embed_tokens.weight", "norm.weight"
_TARGETS = "targets.npy"
_INPUT_NORMS = ("input_layernorm.weight", "hidden_norm.weight")
_STEPS = 2  # draft steps of the calibration
# Keys of a draft's config that affect the computation of a layer
_LAYER_KEYS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
               "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "rope_theta",
               "rope_scaling", "rope_parameters")  # fmt: skip


@dataclass(frozen=True)
class Draft:
    """A float draft with the float base that it was trained for."""

    checkpoint: Checkpoint
    facts: DraftConfig
    base: LanguageModel
    kind = "draft"

    @property
    def float_modules(self) -> tuple[str, ...]:
        """See `QuantizedNetwork`."""
        low_rank = () if self.facts.low_rank is None else (UP, DOWN)
        return ("embed_tokens", "fc", HEAD.removesuffix(".weight"), *low_rank)

    @property
    def taps(self) -> tuple[int, ...]:
        """The base's layers whose hidden states it reads, see `DraftSpec`."""
        return self.facts.hidden_taps

    @property
    def whole(self) -> Checkpoint:
        """See `QuantizedNetwork`."""
        return self.checkpoint

    def stored_name(self, name: str) -> str:
        """See `QuantizedNetwork`."""
        return name

    @property
    def config(self) -> DecoderConfig:
        """Sizes of the draft's layers."""
        return self.facts.decoder

    @property
    def reader(self) -> LanguageModel:
        """The base."""
        return self.base

    @property
    def family(self) -> Family:
        """The family of `layer_config`."""
        return FAMILIES[self.layer_config["model_type"]]

    @property
    def tensors(self) -> TensorSource:
        """The draft's tensors, and those shared with its base."""
        return self._tensors

    @cached_property
    def _tensors(self) -> TensorSource:
        return complete(self.checkpoint.tensors, self.base.tensors, self.facts)

    @property
    def layers(self) -> tuple[str, ...]:
        """See `QuantizedNetwork`."""
        regular = range(1, self.config.num_hidden_layers)
        return (f"{self.facts.first_layer}.", *(f"layers.{index}." for index in regular))

    @property
    def embedding_name(self) -> str:
        """The embedding table's name."""
        return EMBEDDING

    @property
    def head_name(self) -> str:
        """See `QuantizedNetwork`."""
        return HEAD

    @property
    def num_preparations(self) -> int:
        """The base's layers, and the draft's first steps."""
        return self.base.config.num_hidden_layers + 1

    def layer_source(self, index: int) -> dict[str, Tensor]:
        """See `QuantizedNetwork`; without the norms before the first layer's attention."""
        found = read_below(self.tensors, self.layers[index])
        return {name: value for name, value in found.items() if index or name not in _INPUT_NORMS}

    def layer_model(
        self, index: int, tensors: Mapping[str, F32], device: torch.device
    ) -> PreTrainedModel:
        """See `QuantizedNetwork`."""
        return draft_layer_model(self._windowed(index), tensors, device)

    def _windowed(self, index: int) -> dict[str, Any]:
        """The config of a layer; with a window, Mistral is what Llama is without."""
        window = self.window_of(index)
        if window is None:
            return self.layer_config
        own: dict[str, Any] = {"sliding_window": window}
        if self.layer_config["model_type"] == "llama":
            own["model_type"] = "mistral"
        else:
            own |= {"use_sliding_window": True, "layer_types": ["sliding_attention"]}
        return self.layer_config | own

    def window_of(self, index: int) -> int | None:
        """Tokens that a token attends to in a layer, itself included; None: all."""
        kind = self.config.layer_kinds[index]
        return None if kind is None else kind.window

    @cached_property
    def layer_config(self) -> dict[str, Any]:
        """The part of the config that transformers needs for a layer."""
        stored = self.checkpoint.config
        inner = stored.get("transformer_layer_config") or stored
        return {
            "model_type": "qwen3" if self.facts.qk_norm else "llama",
            "num_hidden_layers": 1,
            **{key: inner[key] for key in _LAYER_KEYS if inner.get(key) is not None},
        }

    def norm_model(self, head: F32 | None, device: torch.device) -> PreTrainedModel:
        """Return the final norm, which EAGLE-1 lacks, and the head."""
        norm = {"weight": read_tensor(self.tensors, NORM).floats()} if self.facts.fuses else {}
        return head_model(self.layer_config, norm, head, device)

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """See `QuantizedNetwork`."""
        return logits

    def states_shape(self, rows: Ids, layer: int) -> tuple[int, int, int]:
        """Return the shape of both steps; the last two tokens are only predicted."""
        count, length = rows.shape
        width = self.config.hidden_size
        if not layer:
            name = f"{self.facts.first_layer}.self_attn.q_proj.weight"
            width += self.tensors.infos()[name].shape[1]
        return _STEPS * count, length - _STEPS, width

    def prepare(self, task: Task, streams: Mapping[str, States], notify: Notify) -> None:
        """Run the base, and the float draft's first step."""
        if (task.work.path / _TARGETS).exists() and streams[QUANTIZED].path.exists():
            return
        rows = {name: task.rows(name) for name in streams if name != QUANTIZED}
        base = self._run_base(task, rows, notify)
        for name, ids in rows.items():
            streams[name].write(self.first_steps(ids, base[name], task))
        streams[QUANTIZED].write(streams[FLOAT].batches(torch.device("cpu")))
        weight = read_tensor(self.base.tensors, self.base.head_name)
        head = float_head(weight, task.device, self.base.finish)
        _store_targets(task.work, self.targets_of(base[FLOAT][-1], head, task))
        notify("the draft's first step", self.num_preparations)

    def _run_base(
        self, task: Task, rows: Mapping[str, Ids], notify: Notify
    ) -> dict[str, list[States]]:
        """Return the base's hidden states before each layer, and after the last.

        Only those that the draft reads and the last stay on disk. Resumes after an interrupt.
        """
        base, count = self.base, self.base.config.num_hidden_layers
        found = {
            name: [
                States(
                    task.work.states(f"base_{name}", index),
                    base.states_shape(ids, 0),
                    task.batch_rows,
                )
                for index in range(count + 1)
            ]
            for name, ids in rows.items()
        }
        whole = [
            index
            for index in range(count + 1)
            if all(states[index].path.exists() for states in found.values())
        ]
        if not whole:
            for name, ids in rows.items():
                found[name][0].write(base.embedded(ids, task.batch_rows))
        for index in range(max(whole, default=0), count):
            model = self._base_layer(index, task.device)
            for states in found.values():
                step = functools.partial(run_layer, model)
                states[index].advance(states[index + 1], step, task.device)
            for states in found.values():
                if index not in self.taps:
                    states[index].path.unlink()
            notify(f"base layer {index}", index + 1)
        return found

    def _base_layer(self, index: int, device: torch.device) -> PreTrainedModel:
        source = {name: value.floats() for name, value in self.base.layer_source(index).items()}
        return self.base.layer_model(index, source, device)

    def targets_of(self, last: States, head: Head, task: Task) -> Ids:
        """Return a base's predictions for both steps, as ids of the draft's vocabulary or -1.

        Position j of the first step has token j + 1 as input. It predicts token j + 2, as position
        j + 1 of the base does.

        Args:
            last: hidden states of the base after its last layer.
            head: of the base.
            task: of the run.
        """
        norm = self.base.norm_model(None, task.device)
        chosen = []
        for batch in last.batches(task.device):
            ids = self.draft_ids[greedy(run_layer(norm, batch), head)]
            length = ids.shape[1] - _STEPS
            chosen += [ids[:, step : step + length] for step in range(1, _STEPS + 1)]
        return np.concatenate(chosen)

    @cached_property
    def draft_ids(self) -> Ids:
        """The draft's id of each token of the base; -1: none."""
        targets = read_target_ids(Weights(source=self.tensors), self.facts, self.base.config)
        found = np.full(self.base.config.vocab_size, -1, np.int64)
        targets = np.arange(self.facts.draft_vocab_size) if targets is None else targets
        found[targets] = np.arange(len(targets))
        return found

    def layer_models(self, device: torch.device) -> list[PreTrainedModel]:
        """Return all float layers."""
        return [
            self.layer_model(
                index, {n: v.floats() for n, v in self.layer_source(index).items()}, device
            )
            for index in range(len(self.layers))
        ]

    def inputs(self, device: torch.device) -> Inputs:
        """Return the modules before the first layer."""
        return DraftInputs(self.facts, self.tensors, device)

    def first_steps(
        self, rows: Ids, base: Sequence[States] | Mapping[int, States], task: Task
    ) -> Iterator[torch.Tensor]:
        """Yield states [B, S - 2, D + W] of the first and of the second step for each batch.

        Args:
            rows: token ids of the samples.
            base: the base's hidden states by layer, at least those that the draft reads.
            task: of the run.
        """
        inputs = self.inputs(task.device)
        norm = self.norm_model(None, task.device)
        models = self.layer_models(task.device)
        taps = [base[tap].batches(task.device) for tap in self.taps]
        base_norm = self.base.norm_model(None, task.device) if not self.facts.fuses else None
        table = read_tensor(self.tensors, self.embedding_name)
        for tapped, embeddings in zip(
            zip(*taps, strict=True), embedded(table, rows, task.batch_rows), strict=True
        ):
            tokens = embeddings.to(task.device)
            if base_norm is not None:
                tapped = tuple(run_layer(base_norm, states) for states in tapped)
            hidden = inputs.fuse(tapped)[:, :-_STEPS]
            for step in range(1, _STEPS + 1):
                stop = tokens.shape[1] - _STEPS + step
                states = inputs.join(tokens[:, step:stop], hidden)
                yield states
                for model in models:
                    states = run_layer(model, states)
                hidden = run_layer(norm, states) if self.facts.norms.output else states

    def targets(self, task: Task) -> Targets:
        """Return the base's greedy tokens."""
        ids = np.load(task.work.path / _TARGETS)
        return Targets(ids, np.zeros_like(ids), (task.calibration.name,))

    def needed_bytes(self, batch_tokens: int, copies: int, *, with_head: bool) -> int:
        """See `QuantizedNetwork`."""
        infos = self.tensors.infos()
        own = needed_bytes(
            infos,
            self.layers,
            infos[self.head_name],
            self.config,
            batch_tokens,
            copies,
            with_head=with_head,
        )
        return max(own, self.base.needed_bytes(batch_tokens, 2, with_head=False))

    def states_bytes(self, calibration: Calibration) -> int:
        """Return the bytes of the base's and the draft's hidden states."""
        tokens = calibration.rows.size + 2 * calibration.held_out.size
        base = (len(self.taps) + 2) * self.base.config.hidden_size
        width = self.states_shape(calibration.rows, 0)[2] + self.config.hidden_size
        return 4 * tokens * (base + _STEPS * width)

    def new_config(self, quantization: Mapping[str, Any], *, own_head: bool) -> dict[str, Any]:
        """See `QuantizedNetwork`."""
        del own_head  # a draft's own head comes first anyway
        return {**self.checkpoint.config, "quantization_config": quantization}

    def check_result(self, folder: Path, ignored_keys: tuple[str, ...]) -> None:
        """See `QuantizedNetwork`."""
        result = open_checkpoint(str(folder), tokenizer=False)
        understand_draft(result, self.base.whole, DraftOptions(ignore_config_keys=ignored_keys))


def _store_targets(work: WorkFolder, targets: Ids) -> None:
    partial = work.path / f"{_TARGETS}.partial"
    with partial.open("wb") as stream:
        np.save(stream, targets)
    partial.replace(work.path / _TARGETS)
