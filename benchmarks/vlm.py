"""Images: encoder time, time to the first token with and without cached embeddings, memory.

    pip install -e '.[dev]' -r benchmarks/requirements.txt
    python benchmarks/vlm.py

The shape of Qwen2.5-VL's encoder (width 1280, 16 heads, windows of 112 pixels, full attention in
every fourth block) with random weights and fewer blocks, over a small random decoder: times and
memory do not depend on the values. Engines alternate; ratios are medians.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan, image_plan
from edgellm.core.graph_io import PIXEL_VALUES
from edgellm.core.manifest import VISUAL_ENGINE, load_engine
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.networks import encoder
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.resolve import open_checkpoint
from edgellm.export.pipeline.visual import VisualOptions, export_visual
from edgellm.multimodal.patch_grid import grid_inputs
from edgellm.scripts import smollm2

SIDES = ((448, 448), (896, 644), (1344, 1008))  # width, height; multiples of 28
MEMORY_COUNTS = (1, 2, 4, 8)
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
Encode = Callable[[np.ndarray, tuple[int, int]], object]


def make_model(folder: Path, depth: int) -> None:
    """Write a random checkpoint with a tokenizer of bytes, unless it exists."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    if folder.exists():
        return
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
        build_engine("llm", work / "bundle", found["decoder"], plan, "onnxruntime", lambda _: None)
    for precision in ("none", "int8"):
        found[precision] = work / f"visual-{precision}"
        if not found[precision].exists():
            export_visual(source, work / "visual-bundle", VisualOptions("fp32"))
            plan = image_plan(4, 20000, 20000, threads, precision)
            bundle = work / "visual-bundle"
            build_engine("visual", bundle, found[precision], plan, "onnxruntime", lambda _: None)
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


def encoder_times(encoders: dict[str, Encode], rounds: int) -> None:
    """Print seconds by image size."""
    print(f"{'image':>12} {'tokens':>7}" + "".join(f"{name:>22}" for name in encoders))
    for width, height in SIDES:
        grid = height // 14, width // 14
        pixels = np.random.default_rng(0).standard_normal((grid[0] * grid[1], 1176), np.float32)
        times: dict[str, list[float]] = {name: [] for name in encoders}
        for _ in range(rounds):
            for name, encode in encoders.items():
                if not times[name]:
                    encode(pixels, grid)  # exports this size
                start = time.perf_counter()
                encode(pixels, grid)
                times[name].append(time.perf_counter() - start)
        base = times["transformers"]
        shown = "".join(
            f"{statistics.median(own):11.2f} s"
            f" ({statistics.median(np.array(base) / np.array(own)):5.2f} x)"
            for own in times.values()
        )
        print(f"{width:5} x {height:4} {grid[0] * grid[1] // 4:7}{shown}", flush=True)


def first_token(engines: dict[str, Path], work: Path, rounds: int) -> None:
    """Print milliseconds to the first token, for a new and for a cached picture."""
    from PIL import Image

    llm = LLM(engines["decoder"], multimodal_engine_dir=engines["none"])
    times: dict[str, list[float]] = {"new picture": [], "known picture": []}
    for number in range(rounds):
        noise = np.random.default_rng(number).integers(0, 255, (644, 896, 3), np.uint8)
        Image.fromarray(noise).save(work / "noise.png")
        content = [
            {"type": "image", "image": str(work / "noise.png")},
            {"type": "text", "text": "What?"},
        ]
        for kind in times:
            start = time.perf_counter()
            answer = llm.generate(
                [{"role": "user", "content": content}],
                sampling=SamplingParams(temperature=0),
                max_generate_length=1,
            )
            list(answer)
            times[kind].append((time.perf_counter() - start) * 1e3)
    shown = ", ".join(f"{name} {statistics.median(own):.0f} ms" for name, own in times.items())
    print(f"first token after an image of 896 x 644 pixels: {shown}")


def memory(engine: Path) -> None:
    """Print the peak memory of a process that encodes images of 1920 x 1080 pixels."""
    peaks = []
    for count in MEMORY_COUNTS:
        command = [sys.executable, __file__, "--peak", str(engine), "--count", str(count)]
        peaks.append(float(subprocess.run(command, check=True, capture_output=True).stdout))
    shown = ", ".join(f"{n}: {mb:.0f} MB" for n, mb in zip(MEMORY_COUNTS, peaks, strict=True))
    print(f"peak memory by images of 1920 x 1080, one after another, features kept: {shown}")


def peak(engine: Path, count: int) -> None:
    encode, kept = open_encoder(engine), []
    grid = 1080 // 28 * 2, 1920 // 28 * 2
    for seed in range(count):
        random = np.random.default_rng(seed)
        kept.append(encode(random.standard_normal((grid[0] * grid[1], 1176), np.float32), grid))
    # Not ru_maxrss, which starts at the parent's value.
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    print(int(found[1]) / 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=smollm2.cache_folder() / "benchmarks")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak is not None:
        peak(arguments.peak, arguments.count)
        return
    work = arguments.work / f"vlm-{arguments.depth}"
    work.mkdir(parents=True, exist_ok=True)
    make_model(work / "model", arguments.depth)
    engines = build(work, arguments.threads)
    encoders = {
        "transformers": open_transformers(work / "model", arguments.threads),
        "torch export": open_export(work / "model", work, arguments.threads),
        "products alone": open_products(arguments.depth, arguments.threads),
        "edgellm fp32": open_encoder(engines["none"]),
        "edgellm int8": open_encoder(engines["int8"]),
    }
    encoder_times(encoders, arguments.rounds)
    first_token(engines, work, arguments.rounds)
    memory(engines["none"])


if __name__ == "__main__":
    main()
