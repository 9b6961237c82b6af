"""Report of an engine's kernels: a file of all of them, notes on slow ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgellm.build.tensorrt.builder import Built
from edgellm.build.tensorrt.kernel_log import Kernel
from edgellm.build.tensorrt.profiles import Pass
from edgellm.core.manifest import LAYER_REPORT
from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import ATTEND
from edgellm.device_runtime.runners.tensorrt.library.kernel_nodes import NODES


def write_report(folder: Path, name: str, passes: Sequence[Pass], built: Built) -> None:
    """`<name>.layers.json`: a summary of each pass, and all kernels."""
    content = {
        "told_by": built.told_by,
        "passes": {
            each.name: _summary(_of(built.kernels, index)) for index, each in enumerate(passes)
        },
        "kernels": [asdict(kernel) for kernel in built.kernels],
    }
    path = folder / f"{name}{LAYER_REPORT}"
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def _of(kernels: Sequence[Kernel], pass_index: int) -> list[Kernel]:
    return [kernel for kernel in kernels if kernel.pass_index == pass_index]


def _summary(kernels: Sequence[Kernel]) -> dict[str, Any]:
    return {
        "kernels": len(kernels),
        "fused_attentions": sum(kernel.is_fused_attention for kernel in kernels),
        "plugins": Counter(_plugin(kernel) for kernel in kernels if kernel.is_plugin),
        "products": Counter(product for kernel in kernels for product in kernel.products),
        "reformats": sum(kernel.is_reformat for kernel in kernels),
        "decoded_weights": sum(kernel.decodes_weight for kernel in kernels),
    }


def _plugin(kernel: Kernel) -> str:
    summary = " ".join((kernel.name, *kernel.nodes))
    return next((name for name in NODES if name in summary), "others")


def notes_of(built: Built, passes: Sequence[Pass]) -> tuple[str, ...]:
    """Notes on kernels that are slower than the precision implies; () if kernels are unknown."""
    notes = []
    for index, each in enumerate(passes if built.kernels else ()):
        found = _summary(_of(built.kernels, index))
        fused, own = found["fused_attentions"], found["plugins"][ATTEND]
        if fused < built.attentions:
            notes.append(f"{each.name}: {fused} of {built.attentions} attentions are one kernel")
        if own < built.own_attentions:
            notes.append(
                f"{each.name}: {own} of {built.own_attentions} attentions are edgellm's kernels"
            )
        if found["decoded_weights"] and each.name != "prefill":
            notes.append(
                f"{each.name}: {found['decoded_weights']} weights are decoded to memory in every "
                "pass; int4, nvfp4 with rounded inputs, and 8 bits with a scale for each channel "
                "are not"
            )
        if found["reformats"]:
            notes.append(f"{each.name}: {found['reformats']} tensors are copied into other layouts")
    return tuple(notes)
