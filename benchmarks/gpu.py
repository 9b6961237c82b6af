"""Decoding on an NVIDIA GPU: tokens/s, memory roofline, time of a round, speed-up of speculation.

    python benchmarks/gpu.py decode ENGINE [--json FILE]
    python benchmarks/gpu.py rounds ENGINE       # calls, bytes and time of a step in normal use
    python benchmarks/gpu.py kernels             # against numpy; or recurrent, experts, vocabulary
    python benchmarks/gpu.py attention --contexts 1024 32768 --torch    # times by context
    python benchmarks/gpu.py clock               # bandwidth of the memory
    python benchmarks/gpu.py shape 1b            # random weights: speed, energy, clocks, heat
    python benchmarks/gpu.py model               # predicted speeds beside published ones
    python benchmarks/gpu.py provider ENGINE --onnxruntime FOLDER --include FOLDER

ENGINE is a folder of `llm_build`, with or without a draft. `decode` prints each figure with its
goal. An oracle replaces the draft and predicts a given number of tokens; the draft's forward passes
still run. The expected speed-up of acceptance length `a` is `a / (1 + draft / step)`. `model` and
`provider` need no GPU. `gpu_proof.py` runs all checks. This has not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.gpu import comparison, cuda_calls, model
from harness.gpu.clock import COMPACTION, measured_bandwidths, timed_engines
from harness.gpu.device import open_gpu
from harness.gpu.rounds import on_the_fake_gpu, production
from harness.gpu.timed_runs import OracleCheck, Run, check_oracle, run
from harness.results import FILE, Report

from edgellm.build import backends
from edgellm.build.backends import options_of
from edgellm.build.plan import Plan
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import (
    DRAFT_ENGINE,
    DRAFT_FOLDER,
    LAYER_REPORT,
    LLM_BUNDLE,
    LLM_ENGINE,
    Engine,
    load_bundle,
    load_engine,
)
from edgellm.device_runtime import runners
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.gpu import compute_capability
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.tools.bench.machine import busy_warning, facts

PROMPT = "Write a long story about a lighthouse keeper who finds a letter in a bottle."
LENGTHS = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0)
ROOFLINE_GOAL, LARGE_BYTES = 0.70, 1e9
OUTSIDE_GOAL, ORACLE_GOAL = 0.05, 0.15


def bytes_per_token(engine: Path, manifest: Engine, rows: int) -> tuple[float, str]:
    """Return the bytes that a plain step loads with `rows` in the KV cache, and their source."""
    kv = manifest.decoder.kv.bytes_per_token * rows
    bundle, options = Path(manifest.provenance["bundle"]), manifest.options
    if (bundle / "model.onnx").exists():
        plan = Plan(
            max_input_len=manifest.max_input_len,
            kv_capacity=manifest.max_kv_cache_capacity,
            threads=0,
            prefill=options["prefill"],
            quantize=options["quantize"],
            max_verify_tree_size=manifest.max_verify_tree_size,
            options=options_of(manifest.backend, {"--gpu": options.get("--gpu")}),
        )
        found = load_bundle(bundle, LLM_BUNDLE)
        weights = backends.find(manifest.backend).estimate(bundle, found, plan).decode_bytes
        return weights + kv, "weights of the bundle"
    table = manifest.decoder.vocab_size * manifest.decoder.hidden_size * 2
    plan_bytes = (engine / manifest.main_graphs[0].path).stat().st_size
    return plan_bytes - table + kv, "engine's size less a table of embeddings, so at least"


def measure(engine: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure and print all figures of an engine."""
    manifest = load_engine(engine, LLM_ENGINE)
    has_draft = (engine / DRAFT_FOLDER).is_dir()
    asked = {"prompt": options.prompt, "repeats": options.repeats}
    as_used = production(engine, options.prompt, options.tokens, has_draft=has_draft)
    gc.collect()  # its engines take the GPU's memory
    with timed_engines(runners.find(manifest.backend)) as clocks:
        llm = LLM(engine, spec=SpecOptions() if has_draft else None)
    plain = run(llm, clocks, options.tokens, speculative=False, **asked)
    rows = len(plain.prompt_ids) + len(plain.token_ids) // 2
    needed, how = bytes_per_token(engine, manifest, rows)
    share = needed / 1e6 / options.bandwidth / plain.token_ms
    figures: dict[str, Any] = {
        "engine": {"backend": manifest.backend_version, "machine": manifest.machine,
                   "quantization": manifest.quantization, "model": manifest.decoder.model_type},
        "launches": _launches(engine), "production": as_used,
        "bytes_per_token": needed, "bytes_from": how,
        "plain": plain.as_json(), "roofline": share,
    }  # fmt: skip
    runs = {"plain": plain}
    if has_draft:
        runs["drafted"] = drafted = run(llm, clocks, options.tokens, speculative=True, **asked)
        is_plain = drafted.token_ids == plain.token_ids
        figures["drafted"] = {**drafted.as_json(), "is_plain": is_plain}
    _show_runs(runs)
    if has_draft and not figures["drafted"]["is_plain"]:
        print("the drafted answer is not the plain one: a tie within the precision, or a fault")
    goal = _verdict(share >= ROOFLINE_GOAL, f">= {ROOFLINE_GOAL:.0%}")
    print(
        f"roofline: {needed / 1e9:.3f} GB a token ({how}), {share:.1%} of {options.bandwidth:.0f} "
        f"GB/s; {goal if needed >= LARGE_BYTES else 'no goal below 1 GB'}"
    )
    if has_draft:
        del llm, clocks  # the oracle's engines take the GPU's memory
        gc.collect()
        figures["oracle"] = predict(engine, manifest, options, asked)
    return figures


def _launches(engine: Path) -> dict[str, dict[str, int]]:
    """Return kernels of each forward pass by graph, of an engine built with --layerReport."""
    found = {}
    for path in sorted(engine.rglob(f"*{LAYER_REPORT}")):
        passes = json.loads(path.read_text("utf-8"))["passes"]
        found[path.name.removesuffix(LAYER_REPORT)] = {
            name: each["kernels"] for name, each in passes.items()
        }
    return found


def predict(
    engine: Path, manifest: Engine, options: argparse.Namespace, asked: dict[str, Any]
) -> list[dict[str, Any]]:
    """Measure and print the oracle's figures."""
    draft = load_engine(engine / DRAFT_FOLDER, DRAFT_ENGINE).draft
    steps = min(options.steps, draft.num_heads or options.steps)
    nodes = min(options.nodes, manifest.max_verify_tree_size)
    sizes = SpecOptions(top_k=options.top_k, steps=steps, verify_size=nodes, tree="fixed")
    with timed_engines(runners.find(manifest.backend)) as clocks:
        llm = LLM(engine, spec=sizes)
    plain = run(llm, clocks, options.tokens, speculative=False, **asked)
    lengths = [length for length in LENGTHS if length <= steps + 1]
    checks = check_oracle(llm, clocks, plain, lengths, **asked)
    _show_checks(checks)
    return [{**asdict(each), "deviation": each.deviation} for each in checks]


def _verdict(is_reached: bool, goal: str) -> str:
    return f"goal {goal} {'reached' if is_reached else 'MISSED'}"


def _show_runs(runs: dict[str, Run]) -> None:
    """Print tables of speeds, and of the parts of a step's time."""
    print(f"\n{'':8} {'tokens/s':>9} {'ms/step':>8} {'tokens/step':>12} {'CPU ms/step':>12}")
    for name, found in runs.items():
        step, rate = found.wall_ms / found.steps, 1e3 / found.token_ms
        print(
            f"{name:8} {rate:9.1f} {step:8.3f} {found.tokens / found.steps:12.2f} "
            f"{found.cpu_ms / found.steps:12.3f}"
        )
    for name, found in runs.items():
        parts = found.kernels_ms or {"base": found.base_ms, "draft": found.draft_ms}
        shown = ", ".join(
            f"{part} {ms / found.steps:.3f} ms ({ms / found.wall_ms:.1%})"
            for part, ms in parts.items()
            if ms or part != COMPACTION
        )
        between = found.base_ms + found.draft_ms - sum(found.kernels_ms.values())
        if found.kernels_ms:
            shown += f"; launches and waits {between / found.wall_ms:.1%}"
        clock = "kernels" if found.kernels_ms else "passes (there are no events)"
        verdict = _verdict(found.outside <= OUTSIDE_GOAL, f"<= {OUTSIDE_GOAL:.0%}")
        print(f"{name:8} {clock}: {shown}; outside {found.outside:.1%}, {verdict}")


def _show_checks(checks: Sequence[OracleCheck]) -> None:
    """Print a line for each acceptance length; costs are in plain steps."""
    print(f"\n{'oracle: a':>9} {'found':>6} {'draft':>6} {'verify':>6} {'speed-up':>9} a/(1+draft)")
    for each in checks:
        verdict = _verdict(each.deviation >= -ORACLE_GOAL, f"within {ORACLE_GOAL:.0%}")
        print(
            f"{each.wanted:9.2f} {each.acceptance_length:6.2f} {each.draft:6.3f} "
            f"{each.verification:6.2f} {each.speed_up:9.3f} {each.expected:11.3f}  "
            f"{each.deviation:+.1%}, {verdict}"
            f"{'' if each.is_plain else '; the answer is not the plain one'}"
        )


def show_engine(options: argparse.Namespace) -> None:
    """Measure an engine on this machine's GPU."""
    if compute_capability() is None:
        print("skipped: there is no NVIDIA GPU here")
        return
    try:
        found = {"given": options.bandwidth} if options.bandwidth else measured_bandwidths()
        options.bandwidth = max(found.values())
        machine = {"date": datetime.datetime.now().astimezone().isoformat(), **facts()}
        print("\n".join(f"{name}: {value}" for name, value in machine.items()))
        _show_bandwidths(found)
        if warning := busy_warning():
            print(f"warning: {warning}")
        figures = {"machine": machine, "bandwidth_gb_per_s": found}
        figures |= measure(options.engine, options)
    except EdgeLLMError as error:
        sys.exit(f"error: {error}\nhint: {error.hint}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def _show_bandwidths(found: dict[str, float]) -> None:
    print("memory, GB/s: " + ", ".join(f"{name} {rate:.0f}" for name, rate in found.items()))


def show_clock(options: argparse.Namespace) -> None:
    """Print the memory bandwidth by the GPU's attributes, and by events around copies."""
    del options
    if compute_capability() is None:
        print("skipped: there is no NVIDIA GPU here")
    else:
        _show_bandwidths(measured_bandwidths())


def show_kernels(options: argparse.Namespace) -> None:
    """Check the kernels of a round against numpy; print their times."""
    from harness.gpu.kernels import check_kernels

    device, _ = open_gpu(fake=options.quick)
    _show_figures(check_kernels(device, 5000) if options.quick else check_kernels(device))


def show_attention(options: argparse.Namespace) -> None:
    """Check the attention kernels against numpy; print their times, also by context."""
    from harness.gpu.attention import Sizes, check_attention, time_contexts

    device, sm = open_gpu(fake=options.quick)
    if options.contexts:
        _show_figures(time_contexts(device, sm, options.contexts, with_torch=options.torch))
        return
    _show_figures(check_attention(device, sm, Sizes.small() if options.quick else Sizes()))


def show_recurrent(options: argparse.Namespace) -> None:
    """Check the kernels of recurrent layers against numpy; print their times."""
    from harness.gpu.recurrent import Sizes, check_recurrent

    device, _ = open_gpu(fake=options.quick)
    _show_figures(check_recurrent(device, Sizes.small() if options.quick else Sizes()))


def show_experts(options: argparse.Namespace) -> None:
    """Check the kernels of mixtures of experts against numpy; print their times."""
    from harness.gpu.experts import Sizes, check_experts

    device, _ = open_gpu(fake=options.quick)
    _show_figures(check_experts(device, Sizes.small() if options.quick else Sizes()))


def show_vocabulary(options: argparse.Namespace) -> None:
    """Check the kernels of embeddings and heads against numpy; print their times."""
    from harness.gpu.vocabulary import Sizes, check_vocabulary

    device, _ = open_gpu(fake=options.quick)
    _show_figures(check_vocabulary(device, Sizes.small() if options.quick else Sizes()))


def _show_figures(found: dict[str, float]) -> None:
    for name, value in found.items():
        print(f"{name:32} {value:12.1f}")


def show_shape(options: argparse.Namespace) -> None:
    """Measure a random model in INT4; the last line is JSON."""
    from harness.gpu.shape_speed import measure_speed

    from edgellm.scripts.proof_folder.steps.dry import Mode, pretend

    mode = Mode(dry=options.dry, stand_in=options.stand_in)
    try:
        pretend(options.backend, mode)
        is_small = mode.dry or mode.stand_in
        passed, found = measure_speed(options.shape, options.backend, dry=is_small)
    except EdgeLLMError as error:
        sys.exit(f"error: {error}\nhint: {error.hint}")
    print(json.dumps(found))
    sys.exit(0 if passed else 1)


def show_rounds(options: argparse.Namespace) -> None:
    """Count calls and bytes of plain steps and drafted rounds; the last line is JSON."""
    if options.fake is not None:
        print(json.dumps(on_the_fake_gpu(*options.fake, options.engine, tokens=32)))
    elif compute_capability() is None:
        print("skipped: there is no NVIDIA GPU here")
    else:
        has_draft = (options.engine / DRAFT_FOLDER).is_dir()
        found = production(options.engine, options.prompt, options.tokens, has_draft=has_draft)
        print(json.dumps(found))


def show_model(options: argparse.Namespace) -> None:
    """Print predicted speeds beside published ones; needs no GPU."""
    if options.layers is not None:
        model.LAUNCHES[options.precision] = model.read_launches(options.layers, options.depth)
    comparison.show_ways(options.context, options.capacity)
    comparison.show_fit()
    report = Report(options.results or (None if options.quick else FILE))
    comparison.add_tables(report, comparison.compare())


def show_provider(options: argparse.Namespace) -> None:
    """Count the calls of ONNX Runtime's CUDA provider on a stub of the CUDA runtime."""
    sys.exit(cuda_calls.run(options))


MODES = {
    "decode": show_engine,
    "clock": show_clock,
    "kernels": show_kernels,
    "attention": show_attention,
    "recurrent": show_recurrent,
    "experts": show_experts,
    "vocabulary": show_vocabulary,
    "rounds": show_rounds,
    "shape": show_shape,
    "model": show_model,
    "provider": show_provider,
}
QUICK = ("kernels", "attention", "recurrent", "experts", "vocabulary", "model")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help=f"run {', '.join(QUICK)} on a fake GPU"
    )
    modes = parser.add_subparsers(dest="mode")
    found = {}
    for name, show in MODES.items():
        found[name] = modes.add_parser(name, help=(show.__doc__ or "").partition("\n")[0])
    for name in QUICK:
        found[name].add_argument("--quick", action="store_true", help="a fake GPU and small sizes")
    found["attention"].add_argument(
        "--contexts", type=int, nargs="*", help="only take times, with these live tokens"
    )
    found["attention"].add_argument("--torch", action="store_true", help="also torch's times")
    for name in ("decode", "rounds"):
        found[name].add_argument("engine", type=Path)
        add_run_flags(found[name])
    found["shape"].add_argument("shape", choices=("1b", "8b"))
    found["shape"].add_argument("--backend", default="tensorrt")
    found["shape"].add_argument("--dry", action="store_true", help="a small model on a fake GPU")
    found["shape"].add_argument(
        "--stand_in", action="store_true", help="a small model, which torch computes"
    )
    found["rounds"].add_argument(
        "--fake",
        type=Path,
        nargs=2,
        metavar=("BASE", "DRAFT"),
        help="bundles of the engine, to count on a fake GPU, where times are meaningless",
    )
    found["decode"].add_argument("--json", type=Path, help="also write the figures to this file")
    model.add_flags(found["model"])
    cuda_calls.add_flags(found["provider"])
    return parser


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `measure`."""
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--repeats", type=int, default=3, help="number of runs; the fastest counts")
    parser.add_argument(
        "--bandwidth", type=float, default=0.0, help="memory bandwidth, GB/s; default: measured"
    )
    parser.add_argument(
        "--top_k", type=int, default=4, help="candidates a node of the oracle's trees"
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=16)


def main() -> None:
    """Run one mode, or with `--quick` alone those that need nothing."""
    parser = _parser()
    options = parser.parse_args()
    if options.mode is not None:
        MODES[options.mode](options)
    elif not options.quick:
        parser.error(f"give one of {', '.join(MODES)}")
    else:
        for name in QUICK:
            print(f"\n{name}:")
            MODES[name](parser.parse_args([name, "--quick"]))


if __name__ == "__main__":
    main()
