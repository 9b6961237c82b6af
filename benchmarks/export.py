"""Time and memory of export, quantization and builds.

    pip install -e '.[dev]'
    python benchmarks/export.py export      # an 8B shape takes 50 GB of disk
    python benchmarks/export.py quantize --shape 8b --layers 2
    python benchmarks/export.py build --shapes 1b 8b
    python benchmarks/export.py pack --shapes 8b --layers 4    # packing of a build, and a copy
    python benchmarks/export.py sizes       # bundles and engines of GGUF files, by format and part
    python benchmarks/export.py tensorrt    # engines of TensorRT-RTX, without a GPU

Without a mode, all of them run. Weights are random except in the first row, since neither time nor
memory depends on the values; `quality.py` measures quality. Memory is sampled every 10 ms. The
bound of builds is 600 MB of anonymous memory plus twice the largest weight, as stored or in
float16.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import onnx_ir as ir
from harness import command
from harness.models import checkpoints, random_gguf, random_weights
from harness.results import Report
from harness.timing import (
    Cost,
    elapsed_ms,
    folder_bytes,
    largest_weight,
    median_cost,
    module_command,
    run_process,
)

from edgellm.build.lowering.linears.weights import layer_name, linear_layers
from edgellm.build.onnxruntime_cpu.edgellm_kernels.linears import OwnLinears
from edgellm.build.onnxruntime_cpu.edgellm_kernels.pack_weights import packed_bytes
from edgellm.build.onnxruntime_cpu.graph_variants import variants_of
from edgellm.build.plan import Plan
from edgellm.core.graph_roles import DECODER
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.scripts import smollm2

SCHEMES = {
    "fp8": ["--algo", "max"],
    "int8_sq": [],
    "nvfp4": ["--algo", "max"],
    "int4_awq": ["--algo", "awq"],
    "nvfp4_awq": [],
    "int4_awq, autoround": ["--algo", "autoround"],
    "int4_awq, gptq": ["--algo", "gptq", "--block_size", "32"],
    "fp8, gptq": ["--algo", "gptq"],
    "nvfp4, gptq": ["--algo", "gptq"],
    "mixed, 5.7 bits": ["--target_bits", "5.7"],
}
KINDS = ("Q4_0", "Q4_K", "AWQ")
# Parts of a GGUF file and of its engine.
_HEAD, _ROTARY = "embedding and head in Q6_K", "rotary tables"
_REST, _ALL = "tokenizer, norms, metadata", "all"
_PARTS = ("layers in Q4_K", "layers in Q6_K", _HEAD, _ROTARY, _REST, _ALL)
_BOUND, _COPIES = 600e6, 2
_TORCH_EXPORT = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
model.config.use_cache = False
ids = torch.arange(16)[None]
rows = torch.export.Dim("rows", min=2, max=1024)
torch.onnx.export(model, (ids,), sys.argv[2], dynamo=True, external_data=True,
                  dynamic_shapes={"input_ids": {1: rows}}, opset_version=23, verbose=False)
"""


def random_checkpoint(work: Path, shape: str, layers: int | None, dtype: str) -> Path:
    """Return a checkpoint of random weights with SmolLM2's tokenizer, a file for each layer."""
    config = random_weights.SHAPES[shape]
    config = config if layers is None else {**config, "num_hidden_layers": layers}
    folder = work / f"{shape}-{config['num_hidden_layers']}-{dtype}"
    random_weights.write(config, folder, dtype, shards=True)
    for name, data in open_checkpoint(str(smollm2.fetch())).tokenizer_files.items():
        (folder / name).write_bytes(data)
    return folder


def export(model: Path, output: Path) -> Cost:
    """Return the cost of a process of `edgellm-export`."""
    shutil.rmtree(output, ignore_errors=True)
    flags = "llm", "--model_dir", model, "--output_dir", output
    return run_process(*module_command("edgellm.export.cli", *flags))


def show_export(given: argparse.Namespace, report: Report) -> None:
    """Compare exports with torch.onnx.export, and with copies of the same bytes."""
    output, rows = given.work / "exported", []

    def add(name: str, cost: Cost) -> None:
        peak = f"{cost.peak_bytes / 1e6:.0f}"
        rows.append([name, f"{cost.wall_s:.2f}", f"{cost.cpu_s:.2f}", peak])

    if not given.quick:
        small = checkpoints.smollm2_folder(given.work, "bf16")
        add("SmolLM2 bf16", median_cost([export(small, output) for _ in range(given.rounds)]))
        with tempfile.TemporaryDirectory(dir=given.work) as folder:
            target = Path(folder, "model.onnx")
            traced = run_process(sys.executable, "-c", _TORCH_EXPORT, small, target)
        add("torch.onnx.export(dynamo=True), SmolLM2 without KV cache", traced)
    shape = "small" if given.quick else given.shape or "8b"
    large = random_checkpoint(given.work, shape, given.layers, "BF16")
    copied, copies, exports = given.work / "copied", [], []
    for _ in range(given.rounds):
        copies.append(run_process("cp", "-r", large, copied))
        shutil.rmtree(copied)
        exports.append(export(large, output))
    shutil.rmtree(output)
    size = folder_bytes(large) / 1e9
    add(f"{large.name}, {size:.1f} GB", median_cost(exports))
    add(f"`cp` of {large.name}", median_cost(copies))
    ratio = statistics.median(e.wall_s / c.wall_s for e, c in zip(exports, copies, strict=True))
    report.add("export", ("", "s", "CPU s", "peak MB"), rows)
    print(f"export / cp: {ratio:.2f} x")


def show_quantize(given: argparse.Namespace, report: Report) -> None:
    """Quantize random weights with each scheme."""
    shape = "small" if given.quick else given.shape or "qwen2.5-0.5b"
    model = random_checkpoint(given.work, shape, given.layers, "F32")
    amounts = ["--device", "cpu"]
    if given.quick or given.num_samples:
        amounts += ["--num_samples", given.num_samples or 2, "--seq_len", given.seq_len]
        amounts += ["--held_out", 1]
    rows = []
    for name in ["fp8"] if given.quick else given.schemes:
        output = given.work / f"quantized-{name.replace(', ', '-')}"
        shutil.rmtree(output, ignore_errors=True)
        flags = ["llm", "--model_dir", model, "--output_dir", output, "--quantization"]
        flags += [name.partition(",")[0], *SCHEMES[name], *amounts]
        cost = run_process(*module_command("edgellm.quantize.cli", *flags))
        minutes = [f"{cost.wall_s / 60:.1f}", f"{cost.cpu_s / 60:.1f}"]
        rows.append([name, *minutes, f"{cost.peak_bytes / 1e9:.2f}"])
        shutil.rmtree(output)
    columns = ("scheme", "minutes by the clock", "minutes of processor time", "peak GB")
    report.add("quantize-cost", columns, rows)


def show_build(given: argparse.Namespace, report: Report) -> None:
    """Build engines of quantized weights; fail if one takes more memory than the bound."""
    rows, is_bounded = [], True
    for shape in ["small"] if given.quick else given.shapes:
        for kind in KINDS[:1] if given.quick else given.kinds:
            with tempfile.TemporaryDirectory(dir=given.work) as folder:
                row, is_below = _build(shape, kind, Path(folder))
            rows.append(row)
            is_bounded &= is_below
    columns = ("weights", "bundle MB", "engine MB", "export, anonymous MB")
    columns += ("build, anonymous MB", "bound MB", "build s")
    report.add("build-memory", columns, rows)
    if not is_bounded:
        sys.exit("a build took more than the bound")


def _build(shape: str, kind: str, work: Path) -> tuple[list[str], bool]:
    """Return a row, and whether the build stays below the bound."""
    bundle, engine, config = work / "bundle", work / "engine", random_weights.SHAPES[shape]
    exported = _export_quantized(config, kind, work)
    lengths = "--maxInputLen", 1024, "--maxKVCacheCapacity", 2048
    flags = "--onnxDir", bundle, "--engineDir", engine, *lengths
    built = run_process(*module_command("edgellm.build.cli", *flags))
    bound = _BOUND + _COPIES * largest_weight(bundle)
    sizes = folder_bytes(bundle), folder_bytes(engine), exported.anonymous_bytes
    shown = [f"{size / 1e6:.0f}" for size in (*sizes, built.anonymous_bytes, bound)]
    return [f"{shape} {kind}", *shown, f"{built.wall_s:.1f}"], built.anonymous_bytes <= bound


def _export_quantized(config: dict[str, Any], kind: str, work: Path) -> Cost:
    """Export random quantized weights to `work / "bundle"`."""
    if kind == "AWQ":
        source = random_weights.write_awq(config, work / "checkpoint")
    else:
        source = work / "model.gguf"
        random_gguf.write_dense(config, kind, source)
    flags = "llm", "--model_dir", source, "--output_dir", work / "bundle"
    return run_process(*module_command("edgellm.export.cli", *flags))


def show_pack(given: argparse.Namespace, report: Report) -> None:
    """Pack the linear layers of quantized bundles to the disk; copy a file of that size in turn."""
    rows = []
    for shape in ["small"] if given.quick else given.shapes:
        for kind in KINDS[:1] if given.quick else given.kinds:
            with tempfile.TemporaryDirectory(dir=given.work) as folder:
                rows.append(_pack(shape, kind, Path(folder), given))
    columns = ("weights", "packed MB", "pack MB/s", "copy MB/s", "pack / copy")
    report.add("pack-rate", columns, rows)


def _pack(shape: str, kind: str, work: Path, given: argparse.Namespace) -> list[str]:
    config = random_weights.SHAPES[shape]
    if given.layers is not None:
        config = {**config, "num_hidden_layers": given.layers}
    _export_quantized(config, kind, work)
    bundle = work / "bundle"
    plan = Plan(max_input_len=1024, kv_capacity=2048, threads=given.threads, prefill="auto")
    model = ir.load(bundle / "model.onnx")
    (variant,) = variants_of(DECODER, model, load_bundle(bundle, LLM_BUNDLE), plan)
    assert isinstance(variant.kernel, OwnLinears)
    layers = [
        (form, weight)
        for node, weight in linear_layers(model.graph)
        if (form := variant.kernel.form(weight, layer_name(node))) is not None
    ]
    packed, copy, rates = work / "packed", work / "copy", []

    def pack() -> None:
        with packed.open("wb") as stream:
            for form, weight in layers:
                stream.writelines(packed_bytes(form, weight))
        _flush(packed)

    def copied() -> None:
        shutil.copyfile(packed, copy)
        _flush(copy)

    for _ in range(given.rounds):
        pack_ms = elapsed_ms(pack)
        copy_ms = elapsed_ms(copied)
        size = packed.stat().st_size
        rates.append((size / pack_ms / 1e3, size / copy_ms / 1e3))
    ours, theirs = (statistics.median(each) for each in zip(*rates, strict=True))
    ratio = statistics.median(mine / copied for mine, copied in rates)
    return [f"{shape} {kind}", f"{size / 1e6:.0f}", f"{ours:.0f}", f"{theirs:.0f}", f"{ratio:.0%}"]


def _flush(path: Path) -> None:
    """Wait until a file is on the disk."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def show_sizes(given: argparse.Namespace, report: Report) -> None:
    """Compare bundles and engines with GGUF files of one format; the head is tied, or not."""
    kinds = random_gguf.KINDS[:1] if given.quick else random_gguf.KINDS
    ratios = [
        [ratio for is_tied in (True, False) for ratio in _sizes(kind, is_tied)] for kind in kinds
    ]
    columns = ("format", "bundle, tied head", "engine, tied head")
    columns += ("bundle, head of its own", "engine, head of its own")
    shown = [[f"{ratio:.2f}" for ratio in row] for row in ratios]
    report.add(
        "gguf-sizes", columns, [[kind, *row] for kind, row in zip(kinds, shown, strict=True)]
    )

    _show_parts(given, report)


def _show_parts(given: argparse.Namespace, report: Report) -> None:
    """Compare the parts of a Q4_K_M file, whose head is tied, with those of its engine."""
    shape = "small" if given.quick else "1b"
    config = {**random_weights.SHAPES[shape], "tie_word_embeddings": True}
    with tempfile.TemporaryDirectory(dir=given.work) as folder:
        work = Path(folder)
        _export_quantized(config, random_gguf.MIXED, work)
        flags = "--onnxDir", work / "bundle", "--engineDir", work / "engine", "--noCheck"
        lengths = "--maxInputLen", 1024, "--maxKVCacheCapacity", 8192
        run_process(*module_command("edgellm.build.cli", *flags, *lengths))
        whole = (work / "model.gguf").stat().st_size, folder_bytes(work / "engine")
        stored, engine = _parts_of_file(work / "model.gguf"), _parts_of_engine(work / "engine")
    stored[_REST], engine[_REST] = whole[0] - stored.total(), whole[1] - engine.total()
    stored[_ALL], engine[_ALL] = whole
    rows = []
    for part in _PARTS:
        before, after = stored[part], engine[part]
        added = f"{round(100 * (after - before) / whole[0], 1) + 0:.1f} %"  # no -0.0
        rows.append([part, f"{before / 1e6:.1f}", f"{after / 1e6:.1f}", added])
    report.add("gguf-parts", ("part", "file MB", "engine MB", "added, of the file"), rows)


def _parts_of_file(path: Path) -> Counter[str]:
    """Bytes of a GGUF file's matrices by part."""
    found: Counter[str] = Counter()
    for tensor in gguf.GGUFReader(path).tensors:
        kind = tensor.tensor_type.name
        name = _HEAD if tensor.name == "token_embd.weight" else f"layers in {kind}"
        if name in _PARTS:
            found[name] += int(tensor.n_bytes)
    return found


def _parts_of_engine(folder: Path) -> Counter[str]:
    """Bytes of an engine's tensors by part."""
    found: Counter[str] = Counter()
    for name, value in ir.load(folder / "decode.onnx").graph.initializers.items():
        num_bytes = value.const_value.nbytes if value.const_value is not None else 0
        if name.startswith("head."):
            found[_HEAD] += num_bytes
        elif name.endswith("_packed"):
            found["layers in Q4_K" if "int4" in name else "layers in Q6_K"] += num_bytes
        elif name in ("Cos", "Sin"):
            found[_ROTARY] += num_bytes
    return found


def _sizes(kind: str, is_tied: bool) -> tuple[float, float]:
    """Return the sizes of bundle and engine relative to the file."""
    sizes = {"hidden_size": 512, "vocab_size": 8000, "tie_word_embeddings": is_tied}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        _export_quantized({**random_weights.SHAPES["small"], **sizes}, kind, work)
        flags = "--onnxDir", work / "bundle", "--engineDir", work / "engine", "--noCheck"
        lengths = "--maxInputLen", 64, "--maxKVCacheCapacity", 128  # rotary tables stay small
        run_process(*module_command("edgellm.build.cli", *flags, *lengths))
        stored = (work / "model.gguf").stat().st_size
        return folder_bytes(work / "bundle") / stored, folder_bytes(work / "engine") / stored


def show_tensorrt(given: argparse.Namespace, report: Report) -> None:
    """Build an engine with TensorRT-RTX, whose memory includes pages of mapped files."""
    if not command.has_package("tensorrt_rtx"):
        return
    shape = "small" if given.quick else "qwen2.5-0.5b"
    source = random_checkpoint(given.work, shape, given.layers, "BF16")
    with tempfile.TemporaryDirectory(dir=given.work) as name:
        bundle, engine = Path(name, "bundle"), Path(name, "engine")
        flags = "llm", "--model_dir", source, "--output_dir", bundle, "--dtype", "fp16"
        run_process(*module_command("edgellm.export.cli", *flags))
        flags = "--onnxDir", bundle, "--engineDir", engine, "--backend", "tensorrt"
        peak = run_process(*module_command("edgellm.build.cli", *flags, "--gpu", given.gpu))
        stored, built = folder_bytes(bundle), (engine / "llm.engine").stat().st_size
    times = [f"{peak.anonymous_bytes / stored:.2f}", f"{peak.peak_bytes / stored:.2f}"]
    sizes = [f"{stored / 1e6:.0f}", f"{built / 1e6:.0f}"]
    columns = ("weights", "bundle MB", "engine MB", "anonymous memory / bundle")
    columns += ("resident memory / bundle", "s")
    row = [f"{shape} fp16", *sizes, *times, f"{peak.wall_s:.1f}"]
    report.add("tensorrt-build-memory", columns, [row])


MODES = {
    "export": show_export,
    "quantize": show_quantize,
    "build": show_build,
    "pack": show_pack,
    "sizes": show_sizes,
    "tensorrt": show_tensorrt,
}


def main() -> None:
    parser = command.parser(__doc__, rounds=3, modes=MODES)
    shapes = list(random_weights.SHAPES)
    parser.add_argument("--shape", choices=shapes, help="of export (8b) and quantize (0.5b)")
    parser.add_argument("--layers", type=int, help="fewer layers of the shape")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=SCHEMES)
    parser.add_argument("--num_samples", type=int, help="calibration samples; default: all")
    parser.add_argument("--seq_len", type=int, default=256, help="tokens of such a sample")
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=["1b", "8b"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--gpu", default="12.0", help="compute capability of TensorRT's engines")
    command.run(parser, MODES)


if __name__ == "__main__":
    main()
