"""Images: encoder time, time to the first token, memory, and captions in every precision.

    pip install -e '.[dev]'
    python benchmarks/vlm.py encoder --depth 4 --rounds 3     # and first_token, memory
    python benchmarks/vlm.py captions

The shape of Qwen2.5-VL's encoder (width 1280, 16 heads, windows of 112 pixels, full attention in
every fourth block) has random weights and fewer blocks, over a small random decoder: times and
memory do not depend on the values. Engines alternate; ratios are medians.

`captions`: the synthetic vision-language model of examples/ is quantized, exported, built and run,
without and with its EAGLE-3 draft. It tests the pipeline, not the quality of vision-language
models.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from harness import command
from harness.models.engines import silent
from harness.models.quantized import plain
from harness.results import Report
from harness.timing import alternating, elapsed_ms, memory_bytes, speedup

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan, image_plan
from edgellm.core.graph_io import PIXEL_VALUES
from edgellm.core.manifest import VISUAL_ENGINE, load_engine
from edgellm.device_runtime.api.llm import LLM, RequestOutput
from edgellm.device_runtime.networks import encoder
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.export.pipeline.visual import VisualOptions, export_visual
from edgellm.multimodal.patch_grid import grid_inputs
from edgellm.scripts.demo_images import DRAFT, MODEL
from edgellm.scripts.synthetic_vlm.scenes import Scene, draw, score

SIDES = ((448, 448), (896, 644), (1344, 1008))  # width, height; multiples of 28
MEMORY_COUNTS = (1, 2, 4, 8)
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
Encode = Callable[[np.ndarray, tuple[int, int]], object]


def make_model(folder: Path, depth: int) -> None:
    """Write a random checkpoint with a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    full = [index for index in range(depth) if index % 4 == 3]
    config = Qwen2_5_VLConfig(
        vision_config={"depth": depth, "hidden_size": 1280, "out_hidden_size": 576,
                       "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
                       "window_size": 112, "fullatt_block_indexes": full},
        text_config={"vocab_size": 512, "hidden_size": 576, "intermediate_size": 1536,
                     "num_hidden_layers": 8, "num_attention_heads": 9, "num_key_value_heads": 3,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 1e6,
                                         "mrope_section": [8, 12, 12]},
                     "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
        image_token_id=258, vision_start_token_id=256, vision_end_token_id=257,
        video_token_id=259,
    )  # fmt: skip
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for message in messages %}{% for item in message['content'] %}{% if item['type'] == "
        "'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ item['text'] }}"
        "{% endif %}{% endfor %}{% endfor %}"
    )
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 16384,
    }
    for name, content in (
        ("tokenizer_config.json", {"chat_template": template}),
        ("preprocessor_config.json", settings),
    ):
        (folder / name).write_text(json.dumps(content))


def build(work: Path, threads: int) -> dict[str, Path]:
    """Build the decoder's engine, and the encoder's in float32 and int8."""
    source, found = open_checkpoint(str(work / "model")), {"decoder": work / "engine"}
    if not found["decoder"].exists():
        export_llm(source, work / "bundle", ExportOptions(dtype="fp32"))
        plan = Plan(max_input_len=8192, kv_capacity=8448, threads=threads, prefill="auto")
        build_engine("llm", work / "bundle", found["decoder"], plan, "onnxruntime", silent)
    for precision in ("none", "int8"):
        found[precision] = work / f"visual-{precision}"
        if not found[precision].exists():
            export_visual(source, work / "visual-bundle", VisualOptions("fp32"))
            plan = image_plan(4, 20000, 20000, threads, precision)
            bundle = work / "visual-bundle"
            build_engine("visual", bundle, found[precision], plan, "onnxruntime", silent)
    return found


def open_encoder(engine: Path) -> Encode:
    """Open edgellm's encoder."""
    manifest = load_engine(engine, VISUAL_ENGINE)
    session = encoder.open_encoder(engine, manifest)
    return lambda pixels, grid: session.encode(
        {PIXEL_VALUES: pixels, **grid_inputs(*grid, manifest.vision)}
    )


def open_transformers(model: Path, threads: int) -> Encode:
    """Open the encoder in transformers, float32, with PyTorch's attention."""
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    torch.set_num_threads(threads)
    whole = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    encoder = whole.model.visual.eval()

    def encode(pixels: np.ndarray, grid: tuple[int, int]) -> object:
        with torch.no_grad():
            return encoder(torch.from_numpy(pixels), torch.tensor([(1, *grid)]))

    return encode


def open_export(model: Path, work: Path, threads: int) -> Encode:
    """Open PyTorch's exports of the encoder, one for each image size, on ONNX Runtime."""
    import onnxruntime
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    encoder = Qwen2_5_VLForConditionalGeneration.from_pretrained(model).float().model.visual.eval()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads

    class OfGrid(torch.nn.Module):
        def __init__(self, grid: tuple[int, int]) -> None:
            super().__init__()
            self.encoder, self.grid = encoder, torch.tensor([(1, *grid)])

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return self.encoder(pixels, self.grid).pooler_output

    @functools.lru_cache(maxsize=1)
    def session(grid: tuple[int, int]) -> onnxruntime.InferenceSession:
        path = work / f"exported-{grid[0]}x{grid[1]}.onnx"
        if not path.exists():
            pixels = torch.zeros(grid[0] * grid[1], 1176)
            with warnings.catch_warnings():  # on constants of the trace, which is for one size
                warnings.simplefilter("ignore")
                torch.onnx.export(
                    OfGrid(grid), (pixels,), path, dynamo=False, input_names=["pixels"]
                )
        return onnxruntime.InferenceSession(path, options)

    return lambda pixels, grid: session(grid).run(None, {"pixels": pixels})


def open_products(depth: int, threads: int) -> Encode:
    """Return only the products of all linear layers, float32, in PyTorch."""
    import torch

    torch.set_num_threads(threads)
    blocks = [(1280, 3 * 1280), (1280, 1280), (1280, 3420), (1280, 3420), (3420, 1280)]
    of_patches = [torch.randn(shape) for shape in [(1176, 1280), *blocks * depth]]
    of_tokens = [torch.randn(shape) for shape in [(5120, 5120), (5120, 576)]]

    def multiply(pixels: np.ndarray, grid: tuple[int, int]) -> object:
        del grid
        many = [torch.ones(len(pixels), len(weight)) @ weight for weight in of_patches]
        few = [torch.ones(len(pixels) // 4, len(weight)) @ weight for weight in of_tokens]
        return many, few

    return multiply


def _built(given: argparse.Namespace) -> tuple[Path, dict[str, Path]]:
    """Return the working folder and the engines, made if missing."""
    work = given.work / f"vlm-{given.depth}"
    work.mkdir(parents=True, exist_ok=True)
    if not (model := work / "model").exists():
        partial = work / "model.partial"
        make_model(partial, given.depth)
        partial.rename(model)
    return work, build(work, given.threads)


def show_encoder(given: argparse.Namespace, report: Report) -> None:
    """Measure seconds of an image by its size."""
    work, engines = _built(given)
    encoders = {"edgellm fp32": open_encoder(engines["none"])}
    if not given.quick:
        encoders = {
            "transformers": open_transformers(work / "model", given.threads),
            "torch export": open_export(work / "model", work, given.threads),
            "products alone": open_products(given.depth, given.threads),
            **encoders,
            "edgellm int8": open_encoder(engines["int8"]),
        }
    rows = []
    for width, height in SIDES[: 1 if given.quick else None]:
        grid = height // 14, width // 14
        pixels = np.random.default_rng(0).standard_normal((grid[0] * grid[1], 1176), np.float32)
        calls = {name: functools.partial(e, pixels, grid) for name, e in encoders.items()}
        for call in calls.values():
            call()  # exports this size
        times = alternating(
            {name: functools.partial(elapsed_ms, call) for name, call in calls.items()},
            given.rounds,
        )
        row = [f"{width} x {height}", str(grid[0] * grid[1] // 4)]
        for name, found in times.items():
            row.append(f"{statistics.median(found) / 1e3:.2f}")
            if name.startswith("edgellm") and "transformers" in times:
                row.append(f"{speedup(found, times['transformers']):.2f} x")
        rows.append(row)
    heads = ["image", "image tokens"]
    for name in encoders:
        heads.append(f"{name}, s")
        if name.startswith("edgellm") and not given.quick:
            heads.append("speedup")
    report.add("vlm-encoder", heads, rows)


def show_first_token(given: argparse.Namespace, report: Report) -> None:
    """Measure the time to the first token, for a new and for a cached image."""
    from PIL import Image

    work, engines = _built(given)
    width, height = SIDES[0] if given.quick else SIDES[1]
    llm = LLM(engines["decoder"], multimodal_engine_dir=engines["none"])
    times: dict[str, list[float]] = {"a new image": [], "a cached image": []}
    for number in range(given.rounds):
        noise = np.random.default_rng(number).integers(0, 255, (height, width, 3), np.uint8)
        Image.fromarray(noise).save(work / "noise.png")
        for found in times.values():
            start = time.perf_counter()
            _greedy(llm, work / "noise.png", "What?", 1)
            found.append(time.perf_counter() - start)
    rows = [[name, f"{statistics.median(own):.2f}"] for name, own in times.items()]
    report.add("vlm-first-token", (f"{width} x {height} pixels", "s"), rows)


def _greedy(
    llm: LLM, picture: Path, text: str, tokens: int, *, speculative: bool = True
) -> RequestOutput:
    """Answer a question about an image, greedily."""
    content = [{"type": "image", "image": str(picture)}, {"type": "text", "text": text}]
    answer = llm.generate(
        [{"role": "user", "content": content}],
        sampling=SamplingParams(temperature=0),
        max_generate_length=tokens,
        speculative=speculative,
    )
    list(answer)
    return answer


def show_memory(given: argparse.Namespace, report: Report) -> None:
    """Measure the peak memory of a process that encodes images of 1920 x 1080 pixels."""
    if given.count:
        _encode_many(given.engine, given.count)
        return
    _, engines = _built(given)
    rows = []
    for count in MEMORY_COUNTS[: 1 if given.quick else None]:
        words = [sys.executable, __file__, "memory", "--engine", engines["none"], "--count", count]
        said = subprocess.run([*map(str, words)], check=True, capture_output=True).stdout
        rows.append([str(count), f"{float(said):.2f}"])
    report.add("vlm-memory", ("images", "GB"), rows)


def _encode_many(engine: Path, count: int) -> None:
    """Encode images, keep their embeddings, and print the peak memory in GB."""
    encode, kept = open_encoder(engine), []
    grid = 1080 // 28 * 2, 1920 // 28 * 2
    for seed in range(count):
        random = np.random.default_rng(seed)
        kept.append(encode(random.standard_normal((grid[0] * grid[1], 1176), np.float32), grid))
    print(memory_bytes("VmHWM") / 1e9)


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
        command += ["--output_dir", str(folder), "--quantization", scheme, *plain(scheme)]
        calibration_text(work / "captions.jsonl")
        command += ["--calib_dataset", str(work / "captions.jsonl")]
        subprocess.run(command, check=True, capture_output=True)
    return folder


def open_recipe(work: Path, name: str, threads: int) -> LLM:
    """Build the engines of a recipe, and open them."""
    recipe = RECIPES[name]
    source, slug = open_checkpoint(str(checkpoint(work, recipe.scheme))), name.replace(" ", "_")
    folders = [work / f"{slug}-{part}" for part in ("bundle", "visual", "engine", "encoder")]
    bundle, seeing, engine, encoder = folders
    network = open_checkpoint(str(DRAFT), tokenizer=False)
    export_llm(source, bundle, ExportOptions(dtype="fp32", draft_model_dir=str(DRAFT)))
    export_draft(network, open_checkpoint(str(MODEL)), work / "drafted", DraftOptions("fp32"))
    export_visual(source, seeing, VisualOptions("fp32", quantization=recipe.exported))
    plan = Plan(
        max_input_len=256,
        kv_capacity=512,
        threads=threads,
        prefill="auto",
        quantize=recipe.quantize,
        max_verify_tree_size=60,
    )
    build_engine("llm", bundle, engine, plan, "onnxruntime", silent)
    plan = Plan(
        max_input_len=256, kv_capacity=512, threads=threads, prefill="auto", max_draft_tree_size=60
    )
    build_engine("draft", work / "drafted", engine, plan, "onnxruntime", silent)
    limits = image_plan(4, 1024, 512, threads, recipe.encoder)
    build_engine("visual", seeing, encoder, limits, "onnxruntime", silent)
    return LLM(engine, spec=SpecOptions(), multimodal_engine_dir=encoder)


def tally(answers: list[RequestOutput], drawn: list[Scene]) -> list[str]:
    """Return the numbers of exact captions and right cells."""
    scores = [score(answer.text, scene) for answer, scene in zip(answers, drawn, strict=True)]
    return [str(sum(one.exact for one in scores)), str(sum(one.right_cells for one in scores))]


def show_captions(given: argparse.Namespace, report: Report) -> None:
    """Count exact captions of drawn scenes, plain and with the draft."""
    work = given.work / "captions"
    work.mkdir(parents=True, exist_ok=True)
    drawn: list[Scene] = [draw(FRESH, number) for number in range(given.scenes)]
    pictures = [work / f"{number}.png" for number in range(len(drawn))]
    for scene, path in zip(drawn, pictures, strict=True):
        scene.image.save(path)
    rows = []
    for name in ("fp32",) if given.quick else RECIPES:
        llm = open_recipe(work, name, given.threads)
        plain, eagle = (
            [_greedy(llm, one, "Describe the image.", 64, speculative=drafts) for one in pictures]
            for drafts in (False, True)
        )
        same = sum(a.token_ids == b.token_ids for a, b in zip(plain, eagle, strict=True))
        rounds = [counts for answer in eagle for counts in answer.profile.rounds]
        length = sum(counts.emitted for counts in rounds) / len(rounds)
        rows.append([name, *tally(plain, drawn), str(same), f"{length:.2f}"])
    columns = ("precision", f"exact captions of {len(drawn)}", "right cells")
    report.add("captions", (*columns, "EAGLE-3 with equal ids", "acceptance length"), rows)


MODES = {
    "encoder": show_encoder,
    "first_token": show_first_token,
    "memory": show_memory,
    "captions": show_captions,
}


def main() -> None:
    parser = command.parser(__doc__, MODES, rounds=5)
    parser.add_argument("--depth", type=int, default=8, help="blocks of the encoder")
    parser.add_argument("--scenes", type=int, default=100, help="of `captions`")
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=0, help=argparse.SUPPRESS)
    command.run(parser, MODES, {"depth": 1, "scenes": 3})


if __name__ == "__main__":
    main()
