"""Exact captions of drawn scenes in every precision.

    pip install -e '.[dev]' -r benchmarks/requirements.txt
    python benchmarks/captions.py

The synthetic vision-language model of examples/ is quantized, exported, built and run, without and
with its EAGLE3 draft. It tests the pipeline, not the quality of vision-language models.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan, image_plan
from edgellm.device_runtime.api.llm import LLM, RequestOutput
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.resolve import open_checkpoint
from edgellm.export.pipeline.visual import VisualOptions, export_visual
from edgellm.scripts import smollm2
from edgellm.scripts.demo_images import DRAFT, MODEL
from edgellm.scripts.synthetic_vlm.scenes import Scene, draw, score


@dataclass(frozen=True)
class Recipe:
    """Precision of decoder and encoder, by the step that quantizes them."""

    scheme: str = ""  # edgellm-quantize llm --quantization
    quantize: str = "none"  # llm_build --quantize
    exported: str = "none"  # edgellm-export visual --quantization
    encoder: str = "none"  # visual_build --quantize


RECIPES = {
    "fp32": Recipe(),
    "fp32, encoder int8": Recipe(exported="int8"),
    "fp32, encoder fp8": Recipe(exported="fp8"),
    "int8 at build": Recipe(quantize="int8", encoder="int8"),
    "int4 at build": Recipe(quantize="int4"),
    "fp8, encoder fp8": Recipe("fp8", exported="fp8"),
    **{name: Recipe(name) for name in ("fp8", "int8_sq", "int4_awq", "nvfp4", "nvfp4_awq")},
}
FRESH, CALIBRATION = 777, 999  # first numbers of seeds


def calibration_text(path: Path) -> None:
    """Write captions of other scenes."""
    lines = [
        {
            "messages": [
                {"role": "user", "content": "Describe the image."},
                {"role": "assistant", "content": draw(CALIBRATION, number).caption},
            ]
        }
        for number in range(400)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def checkpoint(work: Path, scheme: str) -> Path:
    """Return the model in that precision; quantize it unless it exists."""
    folder = work / scheme if scheme else MODEL
    if not folder.exists():
        command = [sys.executable, "-m", "edgellm.quantize", "llm", "--model_dir", str(MODEL)]
        command += ["--output_dir", str(folder), "--quantization", scheme]
        calibration_text(work / "captions.jsonl")
        command += ["--calib_dataset", str(work / "captions.jsonl")]
        subprocess.run(command, check=True, capture_output=True)
    return folder


def build(work: Path, name: str, threads: int) -> LLM:
    """Build the engines of a recipe, and open them."""
    recipe = RECIPES[name]
    source, slug = open_checkpoint(str(checkpoint(work, recipe.scheme))), name.replace(" ", "_")
    folders = [work / f"{slug}-{part}" for part in ("bundle", "visual", "engine", "encoder")]
    bundle, seeing, engine, encoder = folders
    network = open_checkpoint(str(DRAFT), tokenizer=False)
    export_llm(source, bundle, ExportOptions(dtype="fp32", draft_model_dir=str(DRAFT)))
    export_draft(network, open_checkpoint(str(MODEL)), work / "drafted", DraftOptions("fp32"))
    export_visual(source, seeing, VisualOptions("fp32", quantization=recipe.exported))
    trees = {"max_verify_tree_size": 60, "max_draft_tree_size": 60}
    plan = Plan(
        max_input_len=256,
        kv_capacity=512,
        threads=threads,
        prefill="auto",
        quantize=recipe.quantize,
        **trees,
    )
    build_engine("llm", bundle, engine, plan, "onnxruntime", lambda _: None)
    plan = Plan(max_input_len=256, kv_capacity=512, threads=threads, prefill="auto", **trees)
    build_engine("draft", work / "drafted", engine, plan, "onnxruntime", lambda _: None)
    limits = image_plan(4, 1024, 512, threads, recipe.encoder)
    build_engine("visual", seeing, encoder, limits, "onnxruntime", lambda _: None)
    return LLM(engine, spec=SpecOptions(), multimodal_engine_dir=encoder)


def caption(llm: LLM, picture: Path, *, speculative: bool) -> RequestOutput:
    """Generate the caption of a picture, greedily."""
    image = {"type": "image", "image": str(picture)}
    content = [image, {"type": "text", "text": "Describe the image."}]
    answer = llm.generate(
        [{"role": "user", "content": content}],
        sampling=SamplingParams(temperature=0),
        max_generate_length=64,
        speculative=speculative,
    )
    list(answer)
    return answer


def tally(answers: list[RequestOutput], drawn: list[Scene]) -> str:
    """Count exact captions and right cells."""
    scores = [score(answer.text, scene) for answer, scene in zip(answers, drawn, strict=True)]
    exact, right = sum(one.exact for one in scores), sum(one.right_cells for one in scores)
    return f"{exact} captions, {right} cells"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=smollm2.cache_folder() / "benchmarks")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--scenes", type=int, default=100)
    arguments = parser.parse_args()
    work = arguments.work / "captions"
    work.mkdir(parents=True, exist_ok=True)
    drawn: list[Scene] = [draw(FRESH, number) for number in range(arguments.scenes)]
    for number, scene in enumerate(drawn):
        scene.image.save(work / f"{number}.png")
    for name in RECIPES:
        llm = build(work, name, arguments.threads)
        pictures = [work / f"{number}.png" for number in range(len(drawn))]
        plain, eagle = (
            [caption(llm, picture, speculative=speculative) for picture in pictures]
            for speculative in (False, True)
        )
        same = sum(a.token_ids == b.token_ids for a, b in zip(plain, eagle, strict=True))
        rounds = [counts for answer in eagle for counts in answer.profile.rounds]
        length = sum(counts.emitted for counts in rounds) / len(rounds)
        print(
            f"{name:20} of {len(drawn)}: plain {tally(plain, drawn)}; EAGLE3 "
            f"{tally(eagle, drawn)}, {same} the same ids, acceptance length {length:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
