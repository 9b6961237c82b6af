"""The protocol of quantized networks, and language models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from edgellm.export.checkpoints.checkpoint import Checkpoint, TensorSource
from edgellm.export.checkpoints.vlm import TextTower, text_tower
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import understand
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.quantize.calibration.hidden_states import States
from edgellm.quantize.calibration.text import Calibration
from edgellm.quantize.formats.modelopt import F32
from edgellm.quantize.formats.tensors import Tensor, read_below, read_tensor
from edgellm.quantize.metrics.divergence import Targets
from edgellm.quantize.metrics.questions import Questions, padded_inputs, read_outputs
from edgellm.quantize.models.carried_states import CarriedStates, carried_states
from edgellm.quantize.models.checks import HEAD, check_model, needed_bytes
from edgellm.quantize.models.experts import read_canonical
from edgellm.quantize.models.families import Family, family_of, finish_logits
from edgellm.quantize.models.one_layer_model import LAYER, head_model, layer_model
from edgellm.quantize.work_folder import ANSWERS, FLOAT, QUANTIZED, WorkFolder

Ids = NDArray[np.int64]
Notify = Callable[[str, int], None]  # finished part, number of finished parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Text, work folder and device of a run."""

    calibration: Calibration
    work: WorkFolder
    batch_rows: int
    device: torch.device
    questions: Questions | None = None

    def rows(self, stream: str) -> Ids:
        """Return the text of a stream of hidden states, token ids [samples, S]."""
        if stream == ANSWERS:
            assert self.questions is not None
            return padded_inputs(read_outputs(self.questions, self.work.path))
        is_held_out = stream in (FLOAT, QUANTIZED)
        return self.calibration.held_out if is_held_out else self.calibration.rows


class QuantizedNetwork(Protocol):
    """A stack of layers over hidden states, with a head."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint whose tensors are replaced."""
        ...

    @property
    def whole(self) -> Checkpoint:
        """The whole checkpoint that the result replaces; `checkpoint` may be a part."""
        ...

    @property
    def kind(self) -> str:
        """The name of its kind in reports."""
        ...

    @property
    def config(self) -> DecoderConfig:
        """Sizes of the layers."""
        ...

    @property
    def reader(self) -> LanguageModel:
        """The language model that computes the text."""
        ...

    @property
    def family(self) -> Family:
        """The structure of its layers."""
        ...

    @property
    def tensors(self) -> TensorSource:
        """All tensors, shared ones included."""
        ...

    @property
    def layers(self) -> tuple[str, ...]:
        """The name prefix of each layer's tensors."""
        ...

    @property
    def head_name(self) -> str:
        """The name of the float head's tensor."""
        ...

    @property
    def float_modules(self) -> tuple[str, ...]:
        """The modules that stay float, except a quantized head."""
        ...

    @property
    def num_preparations(self) -> int:
        """The number of parts of `prepare`."""
        ...

    def stored_name(self, name: str) -> str:
        """Return the name of a tensor or module in `whole`."""
        ...

    def layer_source(self, index: int) -> dict[str, Tensor]:
        """Read a layer's tensors by transformers' names."""
        ...

    def layer_model(
        self, index: int, tensors: Mapping[str, F32], device: torch.device
    ) -> PreTrainedModel:
        """Return a model of one layer."""
        ...

    def norm_model(self, head: F32 | None, device: torch.device) -> PreTrainedModel:
        """Return a model of the final norm, and of a head [V, H] if given."""
        ...

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits [T, V] for the head's output."""
        ...

    def states_shape(self, rows: Ids, layer: int) -> tuple[int, int, int]:
        """Return the shape of hidden states before `layer` for token ids [samples, S]."""
        ...

    def prepare(self, task: Task, streams: Mapping[str, States], notify: Notify) -> None:
        """Write the hidden states before the first layer, unless they exist."""
        ...

    def targets(self, task: Task) -> Targets:
        """Return the right tokens of the held-out text, [samples, T]; -1: none."""
        ...

    def needed_bytes(self, batch_tokens: int, copies: int, *, with_head: bool) -> int:
        """Return an upper estimate of a run's memory."""
        ...

    def states_bytes(self, calibration: Calibration) -> int:
        """Return the maximum disk space of hidden states."""
        ...

    def new_config(self, quantization: Mapping[str, Any], *, own_head: bool) -> dict[str, Any]:
        """Return the config.json of the result."""
        ...

    def check_result(self, folder: Path, ignored_keys: tuple[str, ...]) -> None:
        """Raise the exporter's error if it rejects the result."""
        ...


@dataclass(frozen=True)
class LanguageModel:
    """A float checkpoint of a decoder, or the decoder of a vision-language model."""

    whole: Checkpoint
    tower: TextTower
    config: DecoderConfig
    kind = "language model"
    num_preparations = 0

    @classmethod
    def open(cls, model_dir: str, ignored_keys: tuple[str, ...]) -> LanguageModel:
        """Open and check a checkpoint; raise as `check_model`."""
        return cls.of(open_checkpoint(model_dir), ignored_keys)

    @classmethod
    def of(cls, whole: Checkpoint, ignored_keys: tuple[str, ...]) -> LanguageModel:
        """Check an open checkpoint; raise as `check_model`."""
        config = check_model(whole, ignored_keys)
        tower = text_tower(whole)
        own = replace(tower.checkpoint, config=_plain_positions(tower.checkpoint.config))
        return cls(whole, replace(tower, checkpoint=own), config)

    @property
    def checkpoint(self) -> Checkpoint:
        """The decoder alone."""
        return self.tower.checkpoint

    @property
    def float_modules(self) -> tuple[str, ...]:
        """Head and embedding, and the visual encoder."""
        names = self.whole.tensors.infos()
        text = {self.stored_name(name) for name in self.tensors.infos()}
        others = {_module_of(name) for name in names if name not in text}
        own = ["lm_head", self.embedding_name.removesuffix(".weight")]
        own += self.carried.float_modules if self.carried is not None else ()
        return (*map(self.stored_name, own), *sorted(others))

    def stored_name(self, name: str) -> str:
        """See `QuantizedNetwork`."""
        return self.tower.stored_name(name)

    @property
    def reader(self) -> LanguageModel:
        """The model itself."""
        return self

    @property
    def family(self) -> Family:
        """See `QuantizedNetwork`."""
        return family_of(self.checkpoint.config)

    @property
    def tensors(self) -> TensorSource:
        """The checkpoint's tensors."""
        return self.checkpoint.tensors

    @property
    def layers(self) -> tuple[str, ...]:
        """See `QuantizedNetwork`."""
        return tuple(LAYER.format(index) for index in range(self.config.num_hidden_layers))

    @property
    def embedding_name(self) -> str:
        """The embedding table's name."""
        return f"model.{self.family.embedding}.weight"

    @property
    def head_name(self) -> str:
        """The head's name; the embedding's, if tied."""
        tied = self.config.tie_word_embeddings or HEAD not in self.tensors.infos()
        return self.embedding_name if tied else HEAD

    @cached_property
    def carried(self) -> CarriedStates | None:
        """Values of the hidden states other than the residual stream; None: there are none."""
        return carried_states(self.config)

    def layer_source(self, index: int) -> dict[str, Tensor]:
        """See `QuantizedNetwork`."""
        found = read_below(self.tensors, self.layers[index])
        found = {name: value for name, value in found.items() if not name.endswith("inv_freq")}
        if self.carried is not None and self.carried.is_shared(index):
            unused = self.carried.of_shared
            found = {name: each for name, each in found.items() if not name.startswith(unused)}
        return read_canonical(found, self.family)

    def layer_model(
        self, index: int, tensors: Mapping[str, F32], device: torch.device
    ) -> PreTrainedModel:
        """See `QuantizedNetwork`."""
        config, carried = self.checkpoint.config, self.carried
        if carried is None:
            return layer_model(config, index, tensors, device)
        change = partial(carried.plain, is_shared=carried.is_shared(index))
        return carried.attach(layer_model(config, index, tensors, device, change), index)

    def norm_model(self, head: F32 | None, device: torch.device) -> PreTrainedModel:
        """Return the final norm and the head."""
        found = read_below(self.tensors, f"model.{self.family.norm}.")
        norm = {name: value.floats() for name, value in found.items()}
        model = head_model(self.checkpoint.config, norm, head, device)
        if self.carried is None:
            return model
        self.carried.plain(model.model, is_shared=False)
        return self.carried.attach_norm(model, self.tensors)

    def states_shape(self, rows: Ids, layer: int) -> tuple[int, int, int]:
        """Return the shape of one hidden state for each token."""
        del layer  # all layers are equal
        return (*rows.shape, self._width)

    @property
    def _width(self) -> int:
        """Numbers of a hidden state."""
        return self.config.hidden_size if self.carried is None else self.carried.width

    def prepare(self, task: Task, streams: Mapping[str, States], notify: Notify) -> None:
        """Write the token embeddings."""
        del notify
        for name, states in streams.items():
            states.write(self.embedded(task.rows(name), task.batch_rows))

    def embedded(self, rows: Ids, batch_rows: int) -> Iterator[torch.Tensor]:
        """Yield the first layer's input [B, S, H] for token ids [samples, S], in batches."""
        found = embedded(read_tensor(self.tensors, self.embedding_name), rows, batch_rows)
        scale = self.config.embedding_scale
        if scale is not None:
            found = (batch * scale for batch in found)
        if self.config.normalizes_embeddings:
            size, epsilon = (self.config.hidden_size,), self.config.rms_norm_eps
            found = (torch.nn.functional.rms_norm(batch, size, eps=epsilon) for batch in found)
        if self.carried is None:
            return found

        def table(name: str, rows: Ids) -> Iterator[torch.Tensor]:
            return embedded(read_tensor(self.tensors, name), rows, batch_rows)

        return self.carried.added(self.tensors, rows, found, table)

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """See `QuantizedNetwork`."""
        return finish_logits(self.config, logits)

    def targets(self, task: Task) -> Targets:
        """Return the next tokens."""
        text = task.calibration
        return Targets(text.held_out[:, 1:], text.held_out_kinds[:, 1:], text.kinds)

    def needed_bytes(self, batch_tokens: int, copies: int, *, with_head: bool) -> int:
        """See `QuantizedNetwork`."""
        head = self.tensors.infos()[self.head_name]
        return needed_bytes(
            self.tensors.infos(),
            self.layers,
            head,
            self.config,
            batch_tokens,
            copies,
            with_head=with_head,
        )

    def states_bytes(self, calibration: Calibration) -> int:
        """Return the bytes of hidden states before and after a layer."""
        tokens = calibration.rows.size + 2 * calibration.held_out.size
        return 2 * 4 * self._width * tokens

    def new_config(self, quantization: Mapping[str, Any], *, own_head: bool) -> dict[str, Any]:
        """See `QuantizedNetwork`; a quantized head is untied."""
        config = {**self.whole.config, "quantization_config": quantization}
        return untied(config) if own_head else config

    def check_result(self, folder: Path, ignored_keys: tuple[str, ...]) -> None:
        """See `QuantizedNetwork`."""
        understand(open_checkpoint(str(folder)), ExportOptions(ignore_config_keys=ignored_keys))


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with an untied head."""
    found = {**config, "tie_word_embeddings": False}
    if "tie_embedding" in config:  # LFM2's
        found["tie_embedding"] = False
    if isinstance(text := config.get("text_config"), dict):
        found["text_config"] = {**text, "tie_word_embeddings": False}
    return found


def _plain_positions(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config for text, where M-RoPE's three positions are equal."""
    plain = dict(config)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(key), dict) and "mrope_section" in rope:
            others = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
            plain[key] = {
                name: "default" if value == "mrope" else value for name, value in others.items()
            }
    return plain


def _module_of(name: str) -> str:
    """Return ModelOpt's pattern for the module of a tensor."""
    first, second, *_ = name.split(".")
    return f"{first}.{second}*" if first == "model" else f"{first}*"


def embedded(table: Tensor, rows: Ids, batch_rows: int) -> Iterator[torch.Tensor]:
    """Yield rows of `table` [V, H] for token ids [samples, S]: [B, S, H], in batches."""
    for begin in range(0, len(rows), batch_rows):
        batch = rows[begin : begin + batch_rows]
        known, places = np.unique(batch, return_inverse=True)
        vectors = np.concatenate([table.rows(int(i), int(i) + 1).floats() for i in known])
        yield torch.from_numpy(vectors[places.reshape(batch.shape)])
