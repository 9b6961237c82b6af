"""Limits of an engine that suit its model and the memory of this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import typer

from edgellm.build import backends
from edgellm.build.plan import Plan
from edgellm.build.resource_estimate import predict, require_fit
from edgellm.core.errors import LimitError
from edgellm.core.manifest import Bundle
from edgellm.core.resources import available_memory_bytes
from edgellm.tools.store.store import Recipe

_CONTEXT, _LEAST_CONTEXT = 8192, 1024  # tokens
_BATCH = 4
_CACHE_SHARE = 0.25  # of the available memory, for the KV cache
_WEIGHTS_SHARE = 0.7  # of the available memory, for float weights
_TREE = 60  # nodes


def choose_plan(source: Path, bundle: Bundle, recipe: Recipe, engine: Path) -> tuple[str, Plan]:
    """The backend and the plan of a bundle's engine.

    Args:
        source: folder of the bundle.
        bundle: its manifest.
        recipe: what the user wants.
        engine: the engine's folder.

    Raises:
        LimitError: the context exceeds the model's, or the engine does not fit here.
        EdgeLLMError: no backend works for the device.
    """
    is_speech = bundle.decoder.audio is not None  # which CPUs alone compute
    library, device = ("onnxruntime", "cpu") if is_speech else ("auto", "")
    backend = backends.choose(library, recipe.device or device)
    longest = bundle.decoder.max_positions
    require_positions(recipe.context, longest)

    def estimate(plan: Plan) -> tuple[int, int]:
        found = predict(source, bundle, plan, backend, engine).estimate
        return found.engine_bytes, found.kv_bytes

    memory = available_memory_bytes()
    takes_batches = backends.find(backend).takes_batches
    plans = [
        plan
        for context, batch in _sizes(recipe.context, longest)
        if batch == 1 or not is_speech
        if takes_batches(plan := _plan(bundle, recipe, backend, context, batch)) or batch == 1
    ]
    fitting = (plan for plan in plans if estimate(plan)[1] <= _CACHE_SHARE * memory)
    plan = next(fitting, plans[-1])
    weights = estimate(plan)[0]
    is_float = recipe.quantize is None and bundle.quantization == "none"
    if is_float and weights > _WEIGHTS_SHARE * memory:
        typer.echo(
            f"note: float weights of {weights / 1e9:.1f} GB do not fit: rounding to 4 bits "
            "(--quantize none keeps them)",
            err=True,
        )
        plan = dataclasses.replace(plan, quantize="int4")
    require_fit(predict(source, bundle, plan, backend, engine).needs)
    return backend, plan


def require_positions(context: int | None, longest: int) -> None:
    """Raise `LimitError` if a context exceeds the model's positions."""
    if context is not None and context > longest:
        raise LimitError(
            f"--context {context}: the model has {longest} positions",
            hint=f"give {longest} or less",
        )


def draft_plan(plan: Plan) -> Plan:
    """The plan of a draft's engine, for a base built by `plan`."""
    return dataclasses.replace(
        plan,
        quantize="auto",
        is_eagle_base=False,
        max_verify_tree_size=0,
        max_draft_tree_size=_TREE,
    )


def _plan(bundle: Bundle, recipe: Recipe, backend: str, context: int, batch: int) -> Plan:
    drafts_nothing = (
        recipe.draft == "none" or bool(bundle.pooling) or bundle.decoder.audio is not None
    )
    return Plan(
        max_input_len=context,
        kv_capacity=context,
        max_batch_size=batch,
        quantize=recipe.quantize or "none",
        is_eagle_base=bool(bundle.hidden_taps) and not bundle.pooling,
        max_verify_tree_size=0 if drafts_nothing else min(_TREE, context - 1),
        options=backends.options_of(backend, {}),
    )


def _sizes(context: int | None, longest: int) -> Iterator[tuple[int, int]]:
    """Tokens of a context, and requests of a batch, the most wanted first."""
    chosen = context or min(_CONTEXT, longest)
    yield from ((chosen, batch) for batch in (_BATCH, _BATCH // 2, 1))
    while context is None and chosen // 2 >= _LEAST_CONTEXT:
        chosen //= 2
        yield chosen, 1
