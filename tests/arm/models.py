"""Tiny bundles for the comparison, exported on this machine; needs torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS), str(TESTS / "support"), str(TESTS.parent / "benchmarks")]

import numpy as np  # noqa: E402 - the paths come first
from eagle_engines import EAGLE3, export_pair  # noqa: E402 - the paths come first
from image_checkpoints import picture  # noqa: E402 - the paths come first
from vlm_engines import image_token, make_vlm  # noqa: E402 - the paths come first

from edgellm.export.graph.architecture import ExportOptions  # noqa: E402 - the paths come first
from edgellm.export.pipeline.llm import export_llm  # noqa: E402 - the paths come first
from edgellm.export.pipeline.open_checkpoint import open_checkpoint  # noqa: E402
from edgellm.export.pipeline.visual import VisualOptions, export_visual  # noqa: E402

VLM = "smolvlm"
SIZES = ("--maxInputLen", "64", "--maxKVCacheCapacity", "128", "--threads", "1")
# By name: the bundle's precision, what `llm_build` adds, and whether the logits' bits are compared.
ENGINES = {
    "fp32": ("fp32", (), False),
    "fp16": ("fp16", (), True),
    "int8": ("fp32", ("--quantize", "int8"), True),
    "int4": ("int4", (), True),
}


def main(folder: Path) -> None:
    """Write bundles, an image, and the file that says what is built of them."""
    work = folder / "checkpoints"
    built = []
    for precision in ("fp32", "fp16", "int4"):
        dtype = "fp16" if precision == "fp16" else "fp32"
        pair = export_pair(work / precision, EAGLE3, dtype=dtype, int4=precision == "int4")
        pair.bundle.rename(folder / precision)
        pair.draft_bundle.rename(folder / f"{precision}_draft")
    for name, (bundle, flags, is_exact) in ENGINES.items():
        built.append({"engine": name, "bundle": bundle, "flags": [*SIZES, *flags]})
        built[-1]["is_exact"] = is_exact
    _write_vlm(work, folder)
    (folder / "engines.json").write_text(json.dumps(built, indent=1))


def _write_vlm(work: Path, folder: Path) -> None:
    checkpoint = open_checkpoint(str(make_vlm(work / VLM, VLM)))
    export_llm(checkpoint, folder / "vlm", ExportOptions(dtype="fp32"))
    export_visual(checkpoint, folder / "vlm_visual", VisualOptions("fp32"))
    picture(64, 48).save(folder / "image.png")
    assert image_token(VLM)


if __name__ == "__main__":
    np.random.seed(0)
    main(Path(sys.argv[1]))
