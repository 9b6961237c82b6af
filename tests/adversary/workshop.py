"""Inputs of the attacks: tiny checkpoints, bundles, engines and other files, made once."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from adversary import forker
from adversary.attack import require
from adversary.commands import Commands, Ended
from conftest import make_checkpoint
from lettered_engine import with_letters
from lora_adapters import write_adapter
from PIL import Image

from edgellm.export import models

if TYPE_CHECKING:
    from eagle_engines import EaglePair

REQUESTS = 6


class Workshop:
    """Inputs in `folder`, each made on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands = Commands()
        self.heavy_commands = Commands(modules=(*forker.DEVICE, *forker.TORCH))
        self._at_end: list[Callable[[], object]] = [self.commands.close, self.heavy_commands.close]

    def on_close(self, end: Callable[[], object]) -> None:
        """Register a function that ends a process."""
        self._at_end.append(end)

    def close(self) -> None:
        for end in self._at_end:
            end()

    @functools.cached_property
    def pair(self) -> EaglePair:
        """A base of eight layers with an EAGLE-3 draft, and an engine of both."""
        from eagle_engines import build_pair  # imports torch, which few cases need

        return build_pair(self._new("pair"))

    @functools.cached_property
    def batch_engine(self) -> Path:
        """The same networks for three sequences in a batch."""
        from eagle_engines import for_several

        return for_several(self.pair, self._new("batch") / "engine", 3)

    @functools.cached_property
    def lettered_engine(self) -> Path:
        """The batch engine with characters as tokens, for grammars."""
        return with_letters(self.batch_engine, self._new("letters") / "engine")

    @functools.cached_property
    def checkpoint(self) -> Path:
        """A Llama of two layers, which exports in milliseconds."""
        return make_checkpoint(self._new("tiny"), **models.find("llama").TINY)

    @functools.cached_property
    def bundle(self) -> Path:
        return self._exported("bundle", self.checkpoint)

    @functools.cached_property
    def sharded(self) -> Path:
        """The checkpoint in several files with an index."""
        from transformers import AutoModelForCausalLM

        folder = self._new("sharded")
        shutil.copytree(self.checkpoint, folder, dirs_exist_ok=True)
        (folder / "model.safetensors").unlink()
        model = AutoModelForCausalLM.from_pretrained(self.checkpoint)
        model.save_pretrained(folder, max_shard_size="10KB")
        return folder

    @functools.cached_property
    def pickled(self) -> Path:
        """The checkpoint in torch's own format."""
        import torch
        from safetensors.torch import load_file

        folder = self._new("pickled")
        shutil.copytree(self.checkpoint, folder, dirs_exist_ok=True)
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        return folder

    @functools.cached_property
    def quantized(self) -> Path:
        """The checkpoint rounded to INT4, as `edgellm-quantize` writes one."""
        from harness.models.checkpoints import round_checkpoint

        folder = self._new("quantized") / "checkpoint"
        round_checkpoint(str(self.checkpoint), folder, 16)
        return folder

    @functools.cached_property
    def gguf(self) -> Path:
        """A folder with one GGUF file."""
        from gguf_files import CASES, write_gguf
        from transformers import AutoModelForCausalLM

        folder, (arch, config) = self._new("gguf"), CASES["llama"]
        checkpoint = make_checkpoint(folder / "hf", **config)
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        write_gguf(folder / "model.gguf", arch, model, "Q8_0")
        shutil.rmtree(folder / "hf")
        return folder

    @functools.cached_property
    def adapter(self) -> Path:
        """A LoRA adapter of the checkpoint, in PEFT's layout."""
        return write_adapter(self._new("peft") / "adapter", self.checkpoint)

    @functools.cached_property
    def requests(self) -> dict[str, Any]:
        """The content of a request file, without the adapters."""
        prompts = [f"w{20 + at} w{30 + at} w{40 + at}" for at in range(REQUESTS)]
        requests = [{"messages": [{"role": "user", "content": text}]} for text in prompts]
        return {"temperature": 0, "max_generate_length": 12, "requests": requests}

    @functools.cached_property
    def texts(self) -> list[str]:
        """The outputs of the request file."""
        folder = self._new("texts")
        ended = self.infer(folder, self.pair.engine, self.requests)
        require(ended.code == 0, f"the reference failed: {ended}")
        return answers(folder / "out.json")

    @functools.cached_property
    def calibration(self) -> Path:
        """Text for quantization."""
        folder, rng = self._new("text"), np.random.default_rng(5)
        rows = [" ".join(f"w{word}" for word in rng.integers(9, 96, 40)) for _ in range(24)]
        path = folder / "text.txt"
        path.write_text("\n\n".join(rows))
        return path

    @functools.cached_property
    def conversations(self) -> Path:
        """Conversations with replies, for the training of a draft."""
        path = self._new("data") / "data.jsonl"
        lines = []
        for begin in range(10, 22):
            answer = " ".join(f"w{number}" for number in range(begin + 2, begin + 18))
            turns = [("user", f"w{begin} w{begin + 1}"), ("assistant", answer)]
            said = [{"role": role, "content": content} for role, content in turns]
            lines.append(json.dumps({"messages": said}) + "\n")
        path.write_text("".join(lines))
        return path

    @functools.cached_property
    def pictures(self) -> dict[str, bytes]:
        """Encoded pictures by format."""
        rng, folder = np.random.default_rng(3), self._new("pictures")
        image, found = Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8)), {}
        for name in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "ICO", "JPEG2000", "AVIF"):
            image.save(folder / name, name)
            found[name] = (folder / name).read_bytes()
        return found

    @functools.cached_property
    def films(self) -> dict[str, bytes]:
        """Encoded films by container."""
        import av

        folder, found = self._new("films"), {}
        for name in ("mp4", "mkv", "avi", "ts"):
            path = folder / f"film.{name}"
            with av.open(str(path), "w") as container:
                stream: Any = container.add_stream("mpeg4", rate=10)
                stream.width, stream.height, stream.pix_fmt = 32, 24, "yuv420p"
                for level in range(0, 240, 20):
                    frame = av.VideoFrame.from_image(Image.new("RGB", (32, 24), (level,) * 3))
                    container.mux(stream.encode(frame))
                container.mux(stream.encode())
            found[name] = path.read_bytes()
        return found

    def infer(
        self, folder: Path, engine: Path, content: object, *flags: object, **how: Any
    ) -> Ended:
        """`llm_inference` from in.json to out.json of a folder; bytes are written as they are."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / "in.json").write_bytes(data)
        files = ("--inputFile", folder / "in.json", "--outputFile", folder / "out.json")
        return self.commands.run(
            folder, "llm_inference", "--engineDir", engine, *files, *flags, **how
        )

    def _new(self, name: str) -> Path:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def _exported(self, name: str, checkpoint: Path) -> Path:
        bundle = self._new(name) / "bundle"
        flags = ("--model_dir", checkpoint, "--output_dir", bundle, "--dtype", "fp32")
        ended = self.commands.run(bundle.parent, "edgellm-export", "llm", *flags)
        require(ended.code == 0, f"the reference failed: {ended}")
        return bundle


def answers(path: Path) -> list[str]:
    """The texts of an output file."""
    return [found["output_text"] for found in json.loads(path.read_text())["responses"]]
