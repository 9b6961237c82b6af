"""The demo's last stage: a synthetic vision-language model describes drawn scenes.

The model knows only such scenes: it shows that the pipeline works, not the quality of models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgellm.core.manifest import VISUAL_BUNDLE, VISUAL_ENGINE
from edgellm.scripts.demo_stages import (
    announce,
    build_pair,
    command,
    export_pair,
    is_built,
    is_exported,
    run_unless,
)
from edgellm.scripts.synthetic_vlm import scenes

MODEL = Path(__file__).parents[1] / "examples" / "synthetic-vlm"
DRAFT = MODEL.with_name("synthetic-vlm-eagle3")
_SCENES = 10
_SEED = 2026


def describe(work: Path) -> None:
    """Export, build, caption some scenes, and score the captions."""
    announce("6/6 images", "drawn scenes, described by a synthetic model with EAGLE3")
    bundle, drafted, visual = (work / f"vlm_{name}_bundle" for name in ("llm", "draft", "visual"))
    engine, encoder = work / "vlm_engine", work / "vlm_visual_engine"
    export_pair(MODEL, DRAFT, bundle, drafted)
    run_unless(
        is_exported(visual, VISUAL_BUNDLE, MODEL), "edgellm-export", "visual",
        "--model_dir", MODEL, "--output_dir", visual, "--dtype", "fp32",
    )  # fmt: skip
    build_pair(bundle, drafted, engine, "--maxInputLen", 256, "--maxKVCacheCapacity", 512)
    run_unless(
        is_built(encoder, visual, VISUAL_ENGINE),
        "visual_build",
        "--onnxDir",
        visual,
        "--engineDir",
        encoder,
    )
    drawn = [scenes.draw(_SEED, number) for number in range(_SCENES)]
    requests, answers = work / "vlm_requests.json", work / "vlm_answers.json"
    requests.write_text(json.dumps(_requests(work, drawn), indent=2) + "\n", "utf-8")
    command(
        "llm_inference", "--engineDir", engine, "--multimodalEngineDir", encoder,
        "--inputFile", requests, "--outputFile", answers, "--eagle",
    )  # fmt: skip
    responses = json.loads(answers.read_text("utf-8"))["responses"]
    _show(responses, drawn, work)


def _requests(work: Path, drawn: list[scenes.Scene]) -> dict[str, object]:
    requests = []
    for number, scene in enumerate(drawn):
        path = work / f"scene-{number}.png"
        scene.image.save(path)
        image = {"type": "image", "image": str(path)}
        content = [image, {"type": "text", "text": "Describe the image."}]
        requests.append({"messages": [{"role": "user", "content": content}]})
    return {"temperature": 0, "max_generate_length": 64, "requests": requests}


def _show(responses: list[dict[str, Any]], drawn: list[scenes.Scene], work: Path) -> None:
    captions = [response["output_text"] for response in responses]
    scores = [scenes.score(caption, scene) for caption, scene in zip(captions, drawn, strict=True)]
    print(f"\n  > Describe the image. {(work / 'scene-0.png').as_uri()}\n    {captions[0]}")
    lengths = [response["timings"]["spec_acceptance_length"] for response in responses]
    right, exact = sum(one.right_cells for one in scores), sum(one.exact for one in scores)
    print(
        f"\n  {exact} of {len(drawn)} captions match exactly, {right} of "
        f"{9 * len(drawn)} cells; acceptance length {sum(lengths) / len(lengths):.2f}"
    )
