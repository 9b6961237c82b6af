"""Passes that an engine is compiled for: ranges of the graph's symbolic sizes.

Each pass is an optimization profile. Profiles are in ascending order of rows, like the graphs in
the manifest; a pass runs on the first that supports its rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from edgellm.build.lowering.lora import Places
from edgellm.build.plan import Plan
from edgellm.core.graph_io import HEAD_ROWS
from edgellm.core.graph_roles import ROLES, Rows
from edgellm.core.manifest import Bundle
from edgellm.core.model_spec import AudioEncoderSpec, DecoderSpec, VisionSpec
from edgellm.device_runtime.runners.tensorrt.ragged_batch import shared_rows
from edgellm.device_runtime.runners.tensorrt.state_memory import chunk_rows
from edgellm.multimodal.audio_features import silence, sizes

Range = tuple[int, int]  # minimum and maximum; kernels are optimized for the maximum
_ONE: Range = (1, 1)


@dataclass(frozen=True, slots=True)
class Pass:
    """One kind of pass."""

    name: str
    max_rows: int
    ranges: Mapping[str, Range]  # by symbol of the graph's inputs


def passes_of(role: str, bundle: Bundle, plan: Plan) -> list[Pass]:
    """Passes of a role's engine; the fuse graph has the draft's."""
    rows = ROLES[role].rows
    if rows is Rows.ITEM:
        spec = bundle.spec
        is_audio = isinstance(spec, AudioEncoderSpec)
        return [audio_pass(plan, spec) if is_audio else image_pass(plan, bundle.vision)]
    if rows is Rows.ONE:  # whose sizes are all known
        return [Pass(role, 1, {})]
    if rows is not Rows.TEXT:
        return draft_passes(plan)
    plan, is_causal = in_chunks(bundle, plan), bundle.decoder.min_chunk == 1
    passes, places = base_passes(plan, is_causal=is_causal), Places.of(plan)
    return passes if places is None else [*_with_adapters(passes, places)]


def head_rows(passes: Sequence[Pass]) -> int:
    """Maximum tokens of a pass that get logits or candidates."""
    return max(each.ranges.get(HEAD_ROWS, _ONE)[1] for each in passes)


def in_chunks(bundle: Bundle, plan: Plan) -> Plan:
    """The plan of passes: prompts of linear attention have chunks, whose time is quadratic."""
    rows = plan.max_input_len
    if isinstance(bundle.spec, DecoderSpec) and bundle.spec.recurrent is not None:
        rows = chunk_rows(bundle.spec.recurrent, rows)
    return dataclasses.replace(plan, max_input_len=rows)


def _with_adapters(passes: Sequence[Pass], places: Places) -> Iterator[Pass]:
    """Each pass twice: without adapters, with minimal columns, and with adapters.

    With fixed sizes the adapters' products are fused with the weights'; else they are five kernels.
    """
    for one in passes:
        for suffix, columns in zip(("", "_adapted"), places.ranges(), strict=True):
            yield Pass(f"{one.name}{suffix}", one.max_rows, {**one.ranges, **columns})


def base_passes(plan: Plan, *, is_causal: bool = True) -> list[Pass]:
    """Passes for decoding a token, verifying a tree, prefill.

    A single token has its own profile, since attention then reads the cache in place.

    Args:
        plan: of the engine.
        is_causal: whether no chunk of a prompt has a mask.
    """
    prompt, tree = plan.max_input_len, plan.max_verify_tree_size
    if plan.max_batch_size > 1:
        return _shared_passes(plan, tree, tree if is_causal else max(tree, prompt))
    passes, has_prefill = [_base_pass("decode", _ONE, _ONE, _ONE)], prompt > max(tree, 1)
    if tree > 1:
        images = _ONE if has_prefill else (1, prompt)
        passes.append(_base_pass("verify", (1, tree), (1, tree), images))
    if has_prefill:
        passes.append(_base_pass("prefill", (1, prompt), _ONE, (1, prompt)))
    return passes


def _shared_passes(plan: Plan, tree: int, columns: int) -> list[Pass]:
    """Those of several sequences: a token, tokens or trees, with prompts.

    A mask has at most `columns` columns; pieces of prompts have image rows wherever tokens stand.
    """
    maximum = shared_rows(tree, plan.max_batch_size)
    sizes = {"decode": 1, "tokens": plan.max_batch_size}
    if plan.max_batch_size == maximum:
        del sizes["tokens"]
    sizes |= {"together": maximum, "prefill": plan.max_input_len + maximum}
    return [
        Pass(
            name,
            rows,
            {
                "rows": (1, rows),
                "image_rows": (1, rows),
                "head_rows": (1, min(rows, maximum)),
                "mask_columns": (1, max(columns, 1)),
            },
        )
        for name, rows in sizes.items()
    ]


def _base_pass(name: str, rows: Range, head_rows: Range, image_rows: Range) -> Pass:
    ranges = {"rows": rows, "head_rows": head_rows, "image_rows": image_rows}
    return Pass(name, rows[1], ranges)


def draft_passes(plan: Plan) -> list[Pass]:
    """Passes for growing a tree, which also commits accepted tokens, and prefill."""
    prompt, tree = plan.max_input_len, plan.max_draft_tree_size
    if plan.max_batch_size > 1:
        return _shared_passes(plan, tree, tree)
    step = {"rows": (1, tree), "mask_columns": (1, tree), "head_rows": (1, tree)}
    images = _ONE if prompt > tree else (1, prompt)
    passes = [Pass("step", tree, {**step, "image_rows": images})]
    if prompt > tree:
        prefill = {"rows": (1, prompt), "mask_columns": (1, prompt), "head_rows": _ONE}
        passes.append(Pass("prefill", prompt, {**prefill, "image_rows": (1, prompt)}))
    return passes


def image_pass(plan: Plan, spec: VisionSpec) -> Pass:
    """One image."""
    least, maximum = plan.min_image_tokens, plan.max_image_tokens_per_image
    if spec.image_size:
        tiles = (max(1, least // spec.tokens_per_tile), maximum // spec.tokens_per_tile)
        return Pass("image", tiles[1], {"tiles": tiles})
    block = spec.merge_size**2
    patches = (least * block, maximum * block)
    ranges: dict[str, Range] = {"patches": patches}
    if spec.window_size:
        size = spec.window_size**2
        windows = (1, _max_windows(maximum, spec))
        ranges |= {"windows": windows, "window_slots": (size, windows[1] * size)}
    return Pass("image", patches[1], ranges)


def audio_pass(plan: Plan, spec: AudioEncoderSpec) -> Pass:
    """One clip."""
    longest = silence(spec, plan.max_audio_s)
    least, most = sizes(spec, silence(spec, 0)), sizes(spec, longest)
    ranges = {name: (size, max(size, most[name])) for name, size in least.items()}
    return Pass("audio", max(longest.num_tokens, *most.values()), ranges)


def _max_windows(tokens: int, spec: VisionSpec) -> int:
    """Maximum windows of an image of `tokens` tokens: that of a strip one token high."""
    return -(-tokens * spec.merge_size // spec.window_size)
