"""`edgellm-inspect`: figures compared with independent readers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from manifests import read_manifest, write_manifest
from safetensors.numpy import load_file, save_file

from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.tools.inspection.output.as_json import report_json
from edgellm.tools.inspection.output.page import report_page
from edgellm.tools.inspection.output.tables import size, tables
from edgellm.tools.inspection.roofline import BOARDS, predict
from edgellm.tools.inspection.sources.detect import inspect
from edgellm.tools.inspection.sources.tensors import (
    bytes_by_layer,
    bytes_by_part,
    layer_of,
    part_of,
)

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def visual_folders(tmp_path_factory) -> tuple[Path, Path]:
    """Bundle and engine of the example's encoder."""
    from edgellm.build.engine import build_engine
    from edgellm.build.plan import image_plan
    from edgellm.export.pipeline.visual import VisualOptions, export_visual

    bundle, engine = (tmp_path_factory.mktemp("visual") / name for name in ("bundle", "engine"))
    source = open_checkpoint(str(EXAMPLES / "synthetic-vlm"), tokenizer=False)
    export_visual(source, bundle, VisualOptions("fp32"))
    build_engine("visual", bundle, engine, image_plan(4, 64, 32, 1), "onnxruntime", lambda _: None)
    return bundle, engine


def _shown(path: Path) -> str:
    """Return all cells of the tables."""
    found = tables(inspect(path), 1024)
    return "\n".join(" ".join(row) for table in found for row in table.rows)


@pytest.mark.parametrize(
    ("name", "part", "layer"),
    [
        ("model.embed_tokens.weight", "embedding", None),
        ("model.layers.11.self_attn.q_proj.weight_scale", "attention", 11),
        ("model.layers.11.self_attn.q_norm.weight", "norms", 11),
        ("model.layers.0.post_attention_layernorm.weight", "norms", 0),
        ("model.layers.7.mlp.gate_proj.weight_packed", "mlp", 7),
        ("model.language_model.layers.3.mlp.down_proj.weight", "mlp", 3),
        ("model.norm.weight", "norms", None),
        ("lm_head.weight", "head", None),
        ("language_model.lm_head.weight", "head", None),
        ("midlayer.self_attn.o_proj.weight", "attention", 0),
        ("fc.weight", "other", None),
        ("d2t", "other", None),
        ("blk.4.attn_output.weight", "attention", 4),
        ("blk.4.ffn_norm.weight", "norms", 4),
        ("blk.4.ffn_up.weight", "mlp", 4),
        ("token_embd.weight", "embedding", None),
        ("output.weight", "head", None),
        ("output_norm.weight", "norms", None),
        ("head.model.embed_tokens.int4_blocks", "head", None),
        (
            "layers.5.model.layers.5.mlp.gate_proj+layers.5.model.layers.5.mlp.up_proj.fp32",
            "mlp",
            5,
        ),
        ("model.visual.blocks.2.attn.qkv.weight", "vision", 2),
        ("vision_tower.encoder.layer.9.attention.q_proj.weight", "vision", 9),
        ("model.merger.mlp.0.linear_1.weight", "vision", None),
    ],
)
def test_part_and_layer_follow_from_the_name(name, part, layer):
    assert (part_of(name), layer_of(name)) == (part, layer)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("visual.patch_embed.proj.weight", "embedding"),
        ("visual.blocks.2.attn.qkv.weight", "attention"),
        ("visual.blocks.2.mlp.up_proj.bias", "mlp"),
        ("visual.blocks.2.norm1.weight", "norms"),
        ("visual.merger.mlp.0.weight", "merger"),
        ("model.multi_modal_projector.linear_1.weight", "merger"),
        ("model.vision_tower.encoder.layer.9.attention.q_proj.weight", "attention"),
    ],
)
def test_parts_of_an_encoder_follow_from_the_name(name, part):
    assert part_of(name, is_encoder=True) == part


def test_figures_of_a_checkpoint(tiny_checkpoint):
    report = inspect(tiny_checkpoint)
    arrays = load_file(tiny_checkpoint / "model.safetensors")
    assert {t.name: (t.shape, t.num_bytes) for t in report.tensors} == {
        name: (array.shape, array.nbytes) for name, array in arrays.items()
    }
    by_part = bytes_by_part(report.tensors)
    assert by_part["embedding"] == arrays["model.embed_tokens.weight"].nbytes
    assert sum(by_part.values()) == sum(array.nbytes for array in arrays.values())
    layers = bytes_by_layer(report.tensors)
    assert sorted(layers) == [0, 1, 2]
    assert layers[1] == {
        part: sum(a.nbytes for n, a in arrays.items() if f"layers.1.{key}" in n)
        for part, key in (("attention", "self_attn"), ("mlp", "mlp"), ("norms", ""))
        if part != "norms"
    } | {"norms": sum(a.nbytes for n, a in arrays.items() if "layers.1." in n and "norm" in n)}
    # The tied head reads the whole table, in two bytes a number.
    assert report.read_bytes == sum(array.size for array in arrays.values()) * 2
    assert report.kv_bytes_per_token == 2 * 3 * 2 * 16 * 2
    assert report.capacity == 128


def test_with_an_untied_head_the_embedding_is_not_read_whole(tmp_path, tiny_checkpoint):
    arrays = load_file(tiny_checkpoint / "model.safetensors")
    table = arrays["model.embed_tokens.weight"]
    save_file({**arrays, "lm_head.weight": table.copy()}, tmp_path / "model.safetensors")
    shutil.copy(tiny_checkpoint / "config.json", tmp_path)
    tied, untied = inspect(tiny_checkpoint), inspect(tmp_path)
    assert untied.read_bytes == tied.read_bytes
    assert untied.loaded_bytes == tied.loaded_bytes + table.size * 2


def test_weights_are_not_read(tmp_path, tiny_checkpoint):
    """Reading the sparse file of 50 GB would take minutes."""
    shutil.copy(tiny_checkpoint / "config.json", tmp_path)
    shape = [50_000, 250_000]
    end = 4 * shape[0] * shape[1]
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    report = inspect(tmp_path)
    assert bytes_by_part(report.tensors) == {"embedding": end}
    assert not any(one.fits for one in predict(report, 0)[:2])  # 25 GB in fp16 into 8 and 16 GB
    assert all(one.fits for one in predict(report, 0)[2:])


def test_drafts_and_vision_language_checkpoints_are_recognized():
    draft = inspect(EXAMPLES / "smollm2-135m-instruct-eagle3")
    assert (draft.facts["contents"], draft.is_decoder) == ("EAGLE draft", False)
    assert predict(draft, 0) == ()
    whole = inspect(EXAMPLES / "synthetic-vlm")
    assert whole.facts["contents"] == "vision-language model"
    vision = bytes_by_part(whole.tensors)["vision"]
    stored = sum(tensor.num_bytes for tensor in whole.tensors)
    table = next(t for t in whole.tensors if t.part == "embedding")
    assert whole.read_bytes == stored - vision - table.num_bytes
    assert len(bytes_by_layer(whole.tensors)) == 8


def test_figures_of_a_bundle(tiny_bundle, tiny_checkpoint):
    report = inspect(tiny_bundle)
    arrays = load_file(tiny_checkpoint / "model.safetensors")
    outside = {tensor.name: tensor for tensor in report.tensors if tensor.name in arrays}
    assert outside.keys() == arrays.keys()
    for name, array in arrays.items():
        assert b"".join(outside[name].contents()) == array.tobytes()
    numbers = sum(array.size for array in arrays.values())
    assert numbers * 4 <= report.read_bytes < numbers * 4 + 2000  # constants
    assert report.kv_bytes_per_token == 2 * 3 * 2 * 16 * 4
    (graph,) = report.graphs
    ports = {port.name: (port.dtype, port.dims) for port in graph.inputs}
    assert ports["input_ids"] == ("INT64", (1, "rows"))
    assert ports["past_key_values.2.value"] == ("FLOAT", (1, 2, "kv_capacity", 16))
    assert report.origins[0].path == str(tiny_checkpoint)
    text = _shown(tiny_bundle)
    assert "past_key_values.N.key (3 of them) float [1, 2, kv_capacity, 16]" in text
    assert f"0 to 2 {size(bytes_by_layer(report.tensors)[0]['attention'])}" in text


def test_loaded_bytes_are_those_of_the_compute_type(tmp_path, tiny_checkpoint):
    from edgellm.export.graph.architecture import ExportOptions
    from edgellm.export.pipeline.llm import export_llm

    arrays = load_file(tiny_checkpoint / "model.safetensors")
    halved = {name: array.astype(np.float16) for name, array in arrays.items()}
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_checkpoint / name, tmp_path)
    save_file(halved, tmp_path / "model.safetensors")
    export_llm(open_checkpoint(str(tmp_path)), tmp_path / "fp32", ExportOptions(dtype="fp32"))
    report = inspect(tmp_path / "fp32")  # halves on disk, cast in the graph
    numbers = sum(array.size for array in arrays.values())
    stored = sum(t.num_bytes for t in report.tensors if t.name in arrays)
    assert (stored, report.read_bytes // (numbers * 4)) == (numbers * 2, 1)


def test_figures_of_an_engine_with_two_graphs(tiny_int4_engine):
    report = inspect(tiny_int4_engine)
    manifest = json.loads((tiny_int4_engine / "manifest.json").read_text())
    assert [graph.name for graph in report.graphs] == [
        graph["path"] for graph in manifest["graphs"]["decoder"]
    ]
    assert len(report.graphs) == 2
    costs = {int(rows): ms for rows, ms in manifest["cost_ms"]["pass"].items()}
    assert report.costs[0].ms_by_rows == costs
    # Decoding runs the first graph only, and reads one row of the table.
    table = next(t for t in report.graphs[0].tensors if t.part == "embedding")
    first = sum(tensor.num_bytes for tensor in report.graphs[0].tensors)
    rotations = sum(t.num_bytes for t in report.graphs[0].tensors if t.shape == (64, 8))
    assert first - table.num_bytes - rotations <= report.read_bytes < first - table.num_bytes
    assert "UINT8" in {tensor.dtype for tensor in report.graphs[0].tensors}
    assert report.kv_bytes_per_token * report.capacity == 64 * 2 * 3 * 2 * 16 * 4
    text = _shown(tiny_int4_engine)
    assert f"{costs[1]:.2f} 1.00" in text
    assert "KV cache 64 tokens, float32" in text


def test_an_engine_includes_its_draft(eagle_pair):
    report = inspect(eagle_pair.engine)
    assert report.draft is not None
    assert report.facts["hidden taps"] == "2, 4, 5"
    assert report.facts["largest verified tree"] == "60 nodes"
    assert [costs.what for costs in report.draft.costs] == ["a draft step", "fusing and committing"]
    alone = inspect(eagle_pair.engine / "draft")
    own = sum(tensor.loaded_bytes for tensor in report.tensors)
    assert report.loaded_bytes == own + alone.loaded_bytes
    text = report_page(report, 64)
    assert "Draft: Weights by part" in text
    assert inspect(eagle_pair.draft_bundle).kind == "draft_bundle"
    assert "from base" in _shown(eagle_pair.draft_bundle)


def test_figures_of_visual_bundles_and_engines(visual_folders):
    bundle, engine = visual_folders
    for folder in visual_folders:
        parts = bytes_by_part(inspect(folder).tensors)
        assert {"embedding", "attention", "mlp", "norms", "merger"} <= parts.keys()
        assert predict(inspect(folder), 0) == ()
    assert "patch_positions int64 [patches, 2]" in _shown(bundle)
    assert "tokens of an image 4 to 32" in _shown(engine)


def test_a_compiled_plan_is_described_by_its_manifest(tmp_path, tiny_engine):
    """Its graphs are not ONNX files."""
    engine = Path(shutil.copytree(tiny_engine, tmp_path / "engine"))
    (engine / "decode.onnx").rename(engine / "decode.plan")
    raw = json.dumps(read_manifest(engine)).replace("decode.onnx", "decode.plan")
    write_manifest(engine, json.loads(raw))
    report = inspect(engine)
    assert (report.tensors, predict(report, 0)) == ((), ())
    assert "a pass" in report_page(report, 0)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_a_gguf_file_equals_the_reading_of_package_gguf(tmp_path, kind):
    import gguf

    path = tmp_path / "model.gguf"
    quantization = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_token_list([f"word{index}" for index in range(40)])
    writer.add_array("some.flags", [True, False, True])
    random = np.random.default_rng(0)
    names = ("token_embd", "blk.0.attn_q", "blk.0.ffn_up", "blk.0.attn_norm")
    for name in names:
        shape = (64,) if name.endswith("norm") else (40, 64)
        array = random.standard_normal(shape, np.float32)
        stored = array if len(shape) == 1 else gguf.quantize(array, quantization)
        raw = None if len(shape) == 1 else quantization
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    report = inspect(path)
    reader = gguf.GGUFReader(path)
    assert {t.name: (t.dtype, t.shape, t.num_bytes) for t in report.tensors} == {
        t.name: (t.tensor_type.name, tuple(int(d) for d in t.shape[::-1]), t.n_bytes)
        for t in reader.tensors
    }
    for tensor, stored in zip(report.tensors, reader.tensors, strict=True):
        assert b"".join(tensor.contents()) == stored.data.tobytes()
    assert report.description["tokenizer.ggml.tokens"] == "40 values"
    assert report.description["some.flags"] == [True, False, True]
    assert report.facts["parameters"] == f"{3 * 40 * 64 + 64:,}"
    assert report.kv_bytes_per_token == 2 * 1 * 2 * 16 * 2
    assert report.read_bytes == 2 * (3 * 40 * 64 + 64)  # the table is also the head


def test_predictions_follow_the_roofline(tiny_int4_engine):
    report = inspect(tiny_int4_engine)
    assert report.read_bytes < report.loaded_bytes  # with the table and the second graph
    read = report.read_bytes + 100 * report.kv_bytes_per_token
    for one, bandwidth in zip(predict(report, 100), (102e9, 102.4e9, 204.8e9, 273e9), strict=True):
        assert one.tokens_per_s == pytest.approx(bandwidth / read)
        assert one.needed_bytes == report.loaded_bytes + 100 * report.kv_bytes_per_token
    assert all(board.source for board in BOARDS)
    (table,) = [t for t in tables(report, 100) if t.title.startswith("PREDICTED")]
    assert "100 tokens of context" in table.note
    assert "data sheet" in table.note


def test_origins_report_changed_and_missing_artifacts(tmp_path, tiny_engine, tiny_bundle):
    engine = Path(shutil.copytree(tiny_engine, tmp_path / "engine"))
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    raw = json.dumps(read_manifest(engine)).replace(str(tiny_bundle), str(bundle))
    write_manifest(engine, json.loads(raw))
    found = inspect(engine).origins
    assert [(origin.what, origin.state) for origin in found] == [
        ("bundle", "unchanged"),
        ("checkpoint", "here"),
    ]
    with (bundle / "manifest.json").open("a") as file:
        file.write("\n")
    assert inspect(engine).origins[0].state == "changed"
    shutil.rmtree(bundle)
    assert inspect(engine).origins[0].state == "not here"


def test_origins_include_the_float_checkpoint(tmp_path, tiny_checkpoint):
    quantized = Path(shutil.copytree(tiny_checkpoint, tmp_path / "quantized"))
    report = {
        "quantization": "fp8",
        "settings": {"model_dir": str(tiny_checkpoint)},
        "versions": {"nvidia-modelopt": "0.47.0"},
        "calibration": {"name": "default"},
        "quality": {"perplexity_float": 10.0, "perplexity_quantized": 10.25},
    }
    (quantized / "edgellm_quant.json").write_text(json.dumps(report))
    first, second = inspect(quantized).origins
    assert first.details["quantized to"] == "fp8"
    assert first.details["perplexity"] == "10.000 -> 10.250"
    assert second.path == str(tiny_checkpoint)
    (quantized / "edgellm_quant.json").write_text("[]")
    assert len(inspect(quantized).origins) == 1


def test_json_has_only_json_types(tiny_engine, eagle_pair, visual_folders):
    for folder in (tiny_engine, eagle_pair.engine, *visual_folders):
        report = report_json(inspect(folder), 10)
        assert json.loads(json.dumps(report, allow_nan=False)) == report
