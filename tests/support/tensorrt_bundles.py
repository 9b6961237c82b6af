"""Toy bundles of every kind of graph and precision, and engines that TensorRT-RTX makes of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from conftest import make_checkpoint
from eagle_reference import Layout, make_draft
from medusa_heads import make_heads
from quantized_layouts import LAYOUTS, MODELOPT_INT4, write_checkpoint
from quantized_layouts import Layout as QuantizedLayout
from visual_checkpoints import make_visual_checkpoint
from vlm_engines import make_vlm

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan, image_plan
from edgellm.build.tensorrt.kernel_log import Kernel, Tensor
from edgellm.build.tensorrt.options import TensorRtOptions
from edgellm.export import models, visual
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft
from edgellm.export.pipeline.visual import VisualOptions, export_visual

LAYERS, HEADS, TREE, INPUT, CAPACITY = 4, 6, 12, 48, 72  # no other size is 72
TOWER = "-text"  # after a family: the decoder that reads its images
TEXT = {"hidden_size": 96, "intermediate_size": 64, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1}  # fmt: skip
INNER = {"intermediate_size": 128}  # in blocks of 64; the other widths, 96, have 32 at most
WIDE = {**INNER, "hidden_size": 192}
PRECISIONS = ("fp16", "fp8", "int4_awq", "nvfp4", "int8_sq")
_TAPS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}
DRAFT = Layout(
    {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40, "eagle_config": _TAPS},
    taps=(1, 2, 3),
)


@dataclass(frozen=True)
class Engine:
    """Results of a build: kernels of every pass, notes and sizes."""

    passes: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    notes: tuple[str, ...]

    def of(self, name: str) -> list[Kernel]:
        index = self.passes.index(name)
        return [kernel for kernel in self.kernels if kernel.pass_index == index]


class Bundles:
    """Checkpoints and bundles in a folder, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.make = functools.cache(self._make)

    def _make(self, kind: str, precision: str, dtype: str = "fp16") -> Path:
        bundle = self._folder / f"{kind}-{precision}-{dtype}"
        if kind in ("base", "eagle_base", "wide"):
            options = ExportOptions(dtype=dtype)
            if kind == "eagle_base":
                draft = str(self._checkpoint("draft", "fp16"))
                options = ExportOptions(dtype=dtype, draft_model_dir=draft)
            name = "wide" if kind == "wide" else "base"
            export_llm(open_checkpoint(str(self._checkpoint(name, precision))), bundle, options)
        elif kind.endswith(TOWER):
            export_llm(
                open_checkpoint(str(self._tower(kind, precision))),
                bundle,
                ExportOptions(dtype=dtype),
            )
        elif kind == "heads":
            heads = open_draft(str(make_heads(self._folder / "heads-checkpoint")))
            base = open_checkpoint(str(self._checkpoint("base", "fp16")), tokenizer=False)
            export_draft(heads, base, bundle, DraftOptions(dtype))
        elif kind == "draft":
            names = self._checkpoint("draft", precision), self._checkpoint("base", "fp16")
            checkpoints = (open_checkpoint(str(name), tokenizer=False) for name in names)
            export_draft(*checkpoints, bundle, DraftOptions(dtype))
        else:
            source = open_checkpoint(str(self._checkpoint(kind, "fp16")), tokenizer=False)
            rounding = "none" if precision == "fp16" else precision
            export_visual(source, bundle, VisualOptions(dtype, quantization=rounding))
        return bundle

    def _tower(self, kind: str, precision: str) -> Path:
        folder = self._folder / f"{kind}-{precision}-checkpoint"
        if not folder.exists() and precision == "fp16":
            make_vlm(folder, kind.removesuffix(TOWER), **TEXT)
        elif not folder.exists():
            write_checkpoint(self._tower(kind, "fp16"), folder, _layout(precision), but="visual")
        return folder

    def _checkpoint(self, kind: str, precision: str) -> Path:
        folder = self._folder / f"{kind}-{precision}-checkpoint"
        if folder.exists():
            return folder
        if precision != "fp16":
            write_checkpoint(self._checkpoint(kind, "fp16"), folder, _layout(precision))
        elif kind == "base":
            sizes = {**models.find("llama").TINY, "num_hidden_layers": LAYERS, **INNER}
            make_checkpoint(folder, **sizes, dtype="float16")
        elif kind == "wide":
            sizes = {**models.find("llama").TINY, "num_hidden_layers": LAYERS, **WIDE}
            make_checkpoint(folder, **sizes, dtype="float16")
        elif kind == "draft":
            make_draft(folder, DRAFT)
        else:
            make_visual_checkpoint(folder, visual.find(kind).TINY)
        return folder


def _layout(precision: str) -> QuantizedLayout:
    return MODELOPT_INT4 if precision == "int4_awq" else LAYOUTS[precision]


def compile_bundle(bundle: Path, kind: str, engine: Path, sm: int, lora_rank: int = 0) -> Engine:
    """The engine of a bundle; `engine` is the folder that it goes to."""
    options = TensorRtOptions(target_sm=str(sm), layer_report=True)
    if kind in ("base", "eagle_base", "wide"):
        tree = TREE if kind == "eagle_base" else 0
        limits = {"max_verify_tree_size": tree, "max_lora_rank": lora_rank}
        plan = Plan(
            max_input_len=INPUT,
            kv_capacity=CAPACITY,
            threads=1,
            prefill="auto",
            **limits,
            options=options,
        )
        built = build_engine("llm", bundle, engine, plan, "tensorrt", _silent)
        return _read(engine / "llm.layers.json", built.options["notes"])
    if kind in ("draft", "heads"):
        plan = Plan(
            max_input_len=INPUT,
            kv_capacity=CAPACITY,
            threads=1,
            prefill="auto",
            max_draft_tree_size=TREE,
            options=options,
        )
        built = build_engine("draft", bundle, engine, plan, "tensorrt", _silent)
        return _read(engine / "draft" / f"{kind}.layers.json", built.options["notes"])
    plan = image_plan(4, 512, 256, 1, options=options)
    built = build_engine("visual", bundle, engine, plan, "tensorrt", _silent)
    return _read(engine / "visual.layers.json", built.options["notes"])


def _read(path: Path, notes: Sequence[str]) -> Engine:
    content = json.loads(path.read_text())
    return Engine(tuple(content["passes"]), tuple(map(_kernel, content["kernels"])), tuple(notes))


def _kernel(raw: dict) -> Kernel:
    tensors: Callable[[str], tuple[Tensor, ...]] = lambda role: tuple(  # noqa: E731
        Tensor(each["name"], tuple(each["dims"]), each["dtype"]) for each in raw[role]
    )
    return Kernel(
        pass_index=raw["pass_index"],
        name=raw["name"],
        kind=raw["kind"],
        inputs=tensors("inputs"),
        constants=tensors("constants"),
        outputs=tensors("outputs"),
        nodes=tuple(raw["nodes"]),
    )


def _silent(_: str) -> None:
    pass


def two_layer_bundle(folder: Path, model_type: str, dtype: str = "fp16", **config) -> Path:
    """The first two layers of a tiny model; `config` changes its sizes."""
    make_checkpoint(folder / "checkpoint", **{**models.find(model_type).TINY, **config})
    source = open_checkpoint(str(folder / "checkpoint"))
    export_llm(source, folder / "bundle", ExportOptions(dtype=dtype, num_layers=2))
    return folder / "bundle"
