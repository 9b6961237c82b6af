"""Builds the engines of `models.py` with the installed commands, and writes their outputs.

python outputs.py BUNDLES ENGINES OUTPUTS [OTHERS] runs on both machines, so it needs an installed
edgellm alone, whose commands lie in the folder of the interpreter. OTHERS are engines of the other
machine: exact engines are also run on its weight files, since the sines and cosines of RoPE, which
a build computes, may differ in a last bit.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.core.manifest import LLM_ENGINE, load_engine
from edgellm.device_runtime import LLM
from edgellm.device_runtime.networks.decoder import open_decoder
from edgellm.device_runtime.speculate.options import SpecOptions

PROMPTS = ("w20 w31 w42 w53 w64", "w11 w12 w13 w14 w15 w16 w17 w18", "w77")
TOKENS = 24
PREFIX = 21  # tokens of the compared forward passes: a chunk, then one token


def main(bundles: Path, engines: Path, outputs: Path, others: Path | None = None) -> None:
    outputs.mkdir(parents=True)
    for each in json.loads((bundles / "engines.json").read_text()):
        name, source = each["engine"], bundles / each["bundle"]
        _build("llm_build", source, engines / name, "--eagleBase", *each["flags"])
        draft = source.with_name(f"{source.name}_draft")
        _build("llm_build", draft, engines / name, "--eagleDraft", *each["flags"])
        np.save(outputs / f"{name}.npy", logits(engines / name))
        if others is not None and each["is_exact"]:
            shared = engines / f"{name}_shared"
            shutil.copytree(engines / name, shared)
            for path in (others / name).glob("*.data"):
                shutil.copy(path, shared)
            np.save(outputs / f"{name}_shared.npy", logits(shared))
            _write(outputs / f"{name}.json", texts(shared, verify=False))
        else:
            _write(outputs / f"{name}.json", texts(engines / name))
    flags = "--maxInputLen", "512", "--maxKVCacheCapacity", "576", "--threads", "1"
    _build("llm_build", bundles / "vlm", engines / "vlm", *flags)
    sizes = "--minImageTokens", "1", "--maxImageTokens", "400"
    sizes += "--maxImageTokensPerImage", "200", "--threads", "1"
    _build("visual_build", bundles / "vlm_visual", engines / "vlm_visual", *sizes)
    _write(outputs / "vlm.json", of_an_image(engines, bundles / "image.png"))
    _write(outputs / "served.json", served(engines / "int4"))


def _build(command: str, source: Path, engine: Path, *flags: str) -> None:
    begun = time.monotonic()
    script = Path(sys.executable).with_name(command)
    words = [script, "--onnxDir", source, "--engineDir", engine, *flags]
    made = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    sys.stdout.write(f"{command} {engine.name}: {time.monotonic() - begun:.0f} s\n{made.stderr}")
    sys.stdout.flush()
    if made.returncode:
        sys.exit(made.stdout)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1))


def logits(engine: Path) -> np.ndarray:
    """Float32 [PREFIX + 1, V]: of a chunk, and of one token after it."""
    manifest = load_engine(engine, LLM_ENGINE)
    network = open_decoder(engine, manifest)
    ids = (7 * np.arange(PREFIX + 1) + 11) % manifest.decoder.vocab_size
    chunk = network.run(ids[:PREFIX], 0, np.arange(PREFIX)).logits.copy()
    last = network.run(ids[PREFIX:], PREFIX, np.array([0])).logits
    return np.concatenate([chunk, last])


def texts(engine: Path, verify: bool | None = None) -> dict[str, list[str]]:
    """Greedy texts with and without the draft, and sampled ones of a fixed seed.

    `verify`: False if files were replaced.
    """
    found: dict[str, list[str]] = {}
    for kind, spec in (("plain", None), ("eagle3", SpecOptions())):
        with LLM(engine, spec=spec, verify=verify) as llm:
            greedy = llm.sampling_params(temperature=0.0)
            found[kind] = [_text(llm, prompt, greedy) for prompt in PROMPTS]
            if spec is None:
                sampling = llm.sampling_params(temperature=0.8, top_p=0.9, seed=3)
                found["sampled"] = [_text(llm, prompt, sampling) for prompt in PROMPTS]
    return found


def _text(llm: LLM, prompt: Any, sampling: Any) -> str:
    output = llm.generate(prompt, sampling=sampling, max_generate_length=TOKENS)
    for _ in output:
        pass
    return output.text


def of_an_image(engines: Path, image: Path) -> list[str]:
    content = [{"type": "image", "image": str(image)}, {"type": "text", "text": "w20 w31"}]
    with LLM(engines / "vlm", multimodal_engine_dir=engines / "vlm_visual") as llm:
        greedy = llm.sampling_params(temperature=0.0)
        return [_text(llm, [{"role": "user", "content": content}], greedy)]


def served(engine: Path) -> list[str]:
    """The same greedy texts from `edgellm-serve`, with the draft."""
    script = Path(sys.executable).with_name("edgellm-serve")
    words = [script, "--engineDir", engine, "--port", "0", "--spec", "eagle"]
    with subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)", server.stdout.readline())
        assert found, "the server did not start"
        try:
            return [_completion(int(found[1]), prompt) for prompt in PROMPTS]
        finally:
            server.send_signal(signal.SIGTERM)


def _completion(port: int, prompt: str) -> str:
    connection = HTTPConnection("127.0.0.1", port, timeout=300)
    body = {"model": "int4", "prompt": prompt, "temperature": 0, "max_tokens": TOKENS}
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    assert response.status == 200, answer
    return answer["choices"][0]["text"]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
