"""Expected outputs of tiny models: those of transformers in float32.

Activations of layers with static or dynamic quantization are rounded by torch, as the formats
define it (FP8 E4M3, INT8, NVFP4 of ModelOpt).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from edgellm.build.verify.check import row_errors
from edgellm.device_runtime.arrays import F32, I64
from edgellm.scripts.proof_folder.steps.outputs import (
    ACCEPTED,
    LAYER,
    LENGTH,
    LOGITS,
    PARENTS,
    PROMPT,
    TREE,
    kind_of,
    name_of,
)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCK = 16  # of NVFP4
_E4M3_MAX = 448.0
_STEADY = 0.04  # a relative error of bfloat16; another expert changes a row by more
Rounding = Callable[[torch.Tensor], torch.Tensor]


def roundings(largest: float) -> dict[str, Rounding]:
    """Rounding of activations by precision; `largest` is the calibrated absolute maximum."""

    def int8(x: torch.Tensor) -> torch.Tensor:
        scale = largest / 127
        return (x / scale).round().clamp(-128, 127) * scale

    def fp8(x: torch.Tensor) -> torch.Tensor:
        scale = largest / _E4M3_MAX
        return _e4m3(x / scale) * scale

    def nvfp4(x: torch.Tensor) -> torch.Tensor:
        of_all = largest / (E2M1[-1] * _E4M3_MAX)
        blocks = x.reshape(*x.shape[:-1], -1, _BLOCK)
        scale = _e4m3(blocks.abs().amax(-1, keepdim=True) / E2M1[-1] / of_all) * of_all
        ratio = blocks / torch.where(scale > 0, scale, 1)
        points = torch.tensor(E2M1)
        nearest = points[torch.bucketize(ratio.abs(), (points[1:] + points[:-1]) / 2)]
        return (nearest * ratio.sign() * scale).reshape(x.shape)

    return {"int8": int8, "fp8": fp8, "nvfp4": nvfp4}


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).float()


def expected_outputs(
    checkpoint: Path, texts: I64, rounding: Rounding | None
) -> tuple[dict[str, F32], dict[str, float]]:
    """Outputs of all texts by name, as `outputs_of`, and what float16 changes by kind.

    Args:
        checkpoint: folder of the float32 weights that the tiny model stands for.
        texts: int64 [N, LENGTH].
        rounding: of the inputs of projections; None: they are not rounded.
    """
    model = _model(checkpoint)
    for name, module in model.named_modules():
        if rounding is not None and name.endswith("_proj"):
            module.register_forward_pre_hook(_rounding_hook(rounding))
    exact = _outputs(model, texts)
    return exact, _errors(_outputs(model.half(), texts), exact)


def is_steady(checkpoint: Path, texts: I64) -> bool:
    """Whether bfloat16 changes little, so that float16 chooses no other experts for a text."""
    model = _model(checkpoint)
    exact = _outputs(model, texts)
    return max(_errors(_outputs(model.bfloat16(), texts), exact).values()) < _STEADY


def _model(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _rounding_hook(rounding: Rounding) -> Callable[[Any, tuple[torch.Tensor]], Any]:
    def rounded(_: Any, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (rounding(given[0].float()).to(given[0].dtype),)

    return rounded


@torch.no_grad()
def _outputs(model: Any, texts: I64) -> dict[str, F32]:
    found: dict[str, F32] = {}
    for index, text in enumerate(texts):
        found |= {name_of(part, index): array for part, array in _of_one(model, text)}
    return found


def _of_one(model: Any, text: I64) -> Iterator[tuple[str, F32]]:
    """Outputs of a text: a path of the tree is a text of its own."""
    before, nodes, last = text[:TREE], text[TREE:-1], text[-1:]
    accepted = np.concatenate([before, nodes[list(ACCEPTED)], last])
    assert len(text) == LENGTH
    logits, cache = _run(model, accepted)
    yield f"{LOGITS} of the prompt", logits[PROMPT - 1 : PROMPT]
    yield f"{LOGITS} of a token", logits[PROMPT:TREE]
    rows: dict[int, F32] = {}
    for leaf in set(range(len(PARENTS))) - set(PARENTS):
        path = _path(leaf)
        of_path, _ = _run(model, np.concatenate([before, nodes[path]]))
        rows |= {node: of_path[TREE + depth] for depth, node in enumerate(path)}
    yield f"{LOGITS} of a tree", np.stack([rows[node] for node in range(len(PARENTS))])
    yield f"{LOGITS} of the next token", logits[-1:]
    for layer, planes in enumerate(cache):
        yield f"{LAYER} {layer}", planes


def _path(node: int) -> list[int]:
    """The nodes from the root to one."""
    return [*(_path(PARENTS[node]) if PARENTS[node] >= 0 else ()), node]


def _run(model: Any, ids: I64) -> tuple[F32, list[F32]]:
    """Logits [S, V], and keys and values [2, H, S, D] of the layers that have them."""
    cache = DynamicCache(config=model.config)
    for at, layer in enumerate(cache.layers):  # windows would drop the first positions
        if type(layer) is DynamicSlidingWindowLayer:
            cache.layers[at] = DynamicLayer()
    known = inspect.signature(model.forward).parameters
    argument = "cache" if "cache" in known else "past_key_values"  # of older versions
    given = {argument: cache, "use_cache": True}
    logits = model(torch.from_numpy(ids)[None], **given).logits[0].float().numpy()
    pairs = [(getattr(each, "keys", None), getattr(each, "values", None)) for each in cache.layers]
    held = [(k, v) for k, v in pairs if k is not None and v is not None and k.numel()]
    return logits, [torch.cat(pair).float().numpy() for pair in held]


def _errors(found: Mapping[str, F32], wanted: Mapping[str, F32]) -> dict[str, float]:
    """The largest error of each kind of output."""
    kinds: dict[str, float] = {}
    for name, array in wanted.items():
        error = row_errors(found[name], array)
        kinds[kind_of(name)] = max(error, kinds.get(kind_of(name), 0.0))
    return kinds
