"""Requests of the clients of `serving.py`: texts, and mixtures of images and adapters."""

from __future__ import annotations

import base64
import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgellm.build.engine import build_engine
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.device_runtime.adapted_layers import read_layers

TOPICS = (
    "the sea", "a bicycle", "bread", "the moon", "a robot", "rain", "chess", "a library",
    "tea", "a bridge", "the colour green", "maps", "a clock", "snow", "a garden", "music",
)  # fmt: skip
MOST, RANKS = 16, {"first": 2, "second": 4, "third": 8}


@dataclass(frozen=True)
class Mixture:
    """A language and a visual engine, adapters by name, and pictures."""

    engine: Path
    visual: Path
    adapters: dict[str, Path]
    pictures: list[Path]

    @property
    def flags(self) -> list[str]:
        """Flags of `edgellm-serve`."""
        given = [f"{name}={folder}" for name, folder in self.adapters.items()]
        return ["--multimodalEngineDir", str(self.visual)] + [
            flag for one in given for flag in ("--loraModule", one)
        ]


def mixture(work: Path, demo: Path, threads: int) -> Mixture:
    """Build the demo's model of drawn scenes for a batch of `MOST`, with adapters.

    Args:
        work: folder for missing engines and adapters.
        demo: the folder of `make demo`.
        threads: of the engine.
    """
    engine = work / f"mixture-{threads}"
    if not engine.exists():
        plan = replace(
            Plan(max_input_len=256, kv_capacity=512, threads=threads, prefill="same"),
            max_batch_size=MOST,
            max_lora_rank=8,
        )
        plan = replace(plan, options=CpuOptions("edgellm"))
        build_engine("llm", demo / "vlm_llm_bundle", engine, plan, "onnxruntime", lambda _: None)
    adapters = {name: work / f"mixture-{name}" for name in RANKS}
    for seed, (name, folder) in enumerate(adapters.items()):
        if not folder.exists():
            _write_adapter(folder, engine, RANKS[name], seed)
    pictures = sorted(demo.glob("scene-*.png"))
    return Mixture(engine, demo / "vlm_visual_engine", adapters, pictures)


def _write_adapter(folder: Path, engine: Path, rank: int, seed: int) -> None:
    """Write a random adapter of all layers, as PEFT does."""
    from safetensors.numpy import save_file

    rng, tensors = np.random.default_rng(seed), {}
    for layer in read_layers(engine):
        for side, shape in (
            ("A", (rank, layer.in_features)),
            ("B", (layer.out_features, rank)),
        ):
            name = f"base_model.model.{layer.name}.lora_{side}.weight"
            tensors[name] = rng.normal(0, 0.05, shape).astype(np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    names = sorted({layer.name.rpartition(".")[2] for layer in read_layers(engine)})
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": names}))


def requests(count: int, tokens: int) -> list[dict]:
    """Return requests in the form of request files; every second one is sampled."""
    return [
        {
            "messages": [{"role": "user", "content": f"Tell me {2 + index} things about {topic}."}],
            "temperature": 0.0 if index % 2 else 0.7,
            "seed": index,
            "max_generate_length": tokens,
            "top_p": 1.0,
            "top_k": 0,
        }
        for index, topic in zip(range(count), itertools.cycle(TOPICS), strict=False)
    ]


def mixed_requests(mixed: Mixture, tokens: int) -> list[dict]:
    """Return requests with one, two and no picture, for the base and each adapter."""
    found: list[dict] = []
    shown = [[], *([one] for one in mixed.pictures), mixed.pictures[:2]]
    for pictures, name in itertools.product(shown, (None, *mixed.adapters)):
        (request,) = requests(1, tokens)
        content: list[dict] = [{"type": "image", "image": str(one)} for one in pictures]
        content.append({"type": "text", "text": "Describe the image."})
        request |= {"messages": [{"role": "user", "content": content}], "seed": len(found)}
        request["temperature"] = 0.0 if len(found) % 2 else 0.7
        found.append(request | ({"lora_name": name} if name else {}))
    return found


def as_chat(request: dict) -> bytes:
    """Convert a request to OpenAI's form."""
    body = {name: request[name] for name in ("temperature", "seed", "top_p", "top_k")}
    body["messages"] = [
        {**message, "content": _parts(message["content"])} for message in request["messages"]
    ]
    body |= {"max_tokens": request["max_generate_length"], "stream": True}
    body |= {"model": request["lora_name"]} if "lora_name" in request else {}
    return json.dumps(body).encode()


def _parts(content: str | list[dict]) -> str | list[dict]:
    if isinstance(content, str):
        return content
    return [_shown(part["image"]) if part["type"] == "image" else part for part in content]


def _shown(picture: str) -> dict:
    data = base64.b64encode(Path(picture).read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
