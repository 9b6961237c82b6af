"""The demo's last stage: a synthetic vision-language model describes drawn scenes.

The model knows nothing else: it shows that the pipeline works, not what such models can do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from edgellm.contract import (
    BundleManifest,
    EdgeLLMError,
    EngineManifest,
    VisualBundleManifest,
    VisualEngineManifest,
    load_manifest,
)
from edgellm.tools.stages import command, is_built, say, unless
from edgellm.tools.synthetic_vlm import scenes

Bundle = TypeVar("Bundle", BundleManifest, VisualBundleManifest)
MODEL = Path(__file__).parents[1] / "examples" / "synthetic-vlm"
_SCENES = 10
_SEED = 2026


def describe(work: Path) -> None:
    """Export, build, ask for the captions of some scenes, and score them."""
    say("6/6 images", "drawn scenes, described by a synthetic model")
    bundle, seeing = work / "vlm_bundle", work / "vlm_visual_bundle"
    engine, encoder = work / "vlm_engine", work / "vlm_visual_engine"
    _export("llm", bundle, is_current=_is_current(bundle, BundleManifest))
    _export("visual", seeing, is_current=_is_current(seeing, VisualBundleManifest))
    unless(
        is_built(engine, bundle, EngineManifest), "llm_build", "--onnxDir", bundle,
        "--engineDir", engine, "--maxInputLen", 256, "--maxKVCacheCapacity", 512,
    )  # fmt: skip
    unless(
        is_built(encoder, seeing, VisualEngineManifest), "visual_build", "--onnxDir", seeing,
        "--engineDir", encoder,
    )  # fmt: skip
    drawn = [scenes.draw(_SEED, number) for number in range(_SCENES)]
    requests, answers = work / "vlm_requests.json", work / "vlm_answers.json"
    requests.write_text(json.dumps(_requests(work, drawn), indent=2) + "\n", "utf-8")
    command(
        "llm_inference", "--engineDir", engine, "--multimodalEngineDir", encoder,
        "--inputFile", requests, "--outputFile", answers,
    )  # fmt: skip
    responses = json.loads(answers.read_text("utf-8"))["responses"]
    _show([response["output_text"] for response in responses], drawn, work)


def _export(what: str, bundle: Path, *, is_current: bool) -> None:
    unless(
        is_current, "edgellm-export", what, "--model_dir", MODEL, "--output_dir", bundle,
        "--dtype", "fp32",
    )  # fmt: skip


def _is_current(bundle: Path, kind: type[Bundle]) -> bool:
    try:
        manifest = load_manifest(bundle, kind)
    except EdgeLLMError:
        return False
    made = bundle.stat().st_mtime
    weights = MODEL / "model.safetensors"
    return manifest.provenance["checkpoint"] == str(MODEL) and weights.stat().st_mtime < made


def _requests(work: Path, drawn: list[scenes.Scene]) -> dict[str, object]:
    requests = []
    for number, scene in enumerate(drawn):
        path = work / f"scene-{number}.png"
        scene.image.save(path)
        image = {"type": "image", "image": str(path)}
        content = [image, {"type": "text", "text": "Describe the image."}]
        requests.append({"messages": [{"role": "user", "content": content}]})
    return {"temperature": 0, "max_generate_length": 64, "requests": requests}


def _show(captions: list[str], drawn: list[scenes.Scene], work: Path) -> None:
    scores = [scenes.score(caption, scene) for caption, scene in zip(captions, drawn, strict=True)]
    print(f"\n  > Describe the image. {(work / 'scene-0.png').as_uri()}\n    {captions[0]}")
    right, exact = sum(one.right_cells for one in scores), sum(one.exact for one in scores)
    print(
        f"\n  {exact} of {len(drawn)} captions are right to the word, {right} of "
        f"{9 * len(drawn)} cells"
    )
