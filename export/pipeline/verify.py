"""`edgellm-export --verify`: the exported graph on ONNX Runtime against transformers."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.commands.extras import install
from edgellm.core.errors import EdgeLLMError, UnsupportedModelError
from edgellm.core.graph_roles import COMMIT, DECODER
from edgellm.core.manifest import Bundle
from edgellm.core.model_spec import DecoderSpec
from edgellm.core.peft_adapter import plain_name, read_adapter
from edgellm.export.checkpoints.checkpoint import Checkpoint
from edgellm.export.checkpoints.gguf.reader import is_split
from edgellm.export.checkpoints.lora_merge import floats
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.causal_lm import register_causal_lms
from edgellm.export.pipeline.dequantize import round_inputs, write_floats
from edgellm.export.pipeline.nvfp4_reference import has_fp4, open_fp4

PROMPT = (
    "A speculative decoder drafts a few tokens with a small network and lets the large one check "
    "all of them in a single pass. Why does the answer not change?"
)
_DECODED_TOKENS = 8
_SPREAD_TOKENS = 32  # of the vocabulary, if the tokenizer makes too few of the prompt
_FIRST_WITH_OPSET_24 = (1, 24)
_WEIGHTS_OF_BYTES = "session.model_external_initializers_file_folder_path"


# Limits of relative errors, by the bundle's type, from tiny random models of all families and
# SmolLM2, whose errors reach 1.4e-5 in float32 and 1.7e-2 in float16. Both sides use dequantized
# weights, so weight rounding cancels. Layers that round their inputs amplify last bits (errors up
# to 0.012 in float32, 0.24 in float16), as do routers in float16 (0.17). Logits of another model
# differ by 1 and more.
_LIMITS = {"float32": 1e-3, "float16": 0.05}
_LIMITS_OF_CHOICES = {"float32": 0.1, "float16": 0.5}
_LEAST_AGREEMENT = 0.5


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs of a base for all tokens of a prompt."""

    logits: NDArray[np.float32]  # [S, V]
    taps: NDArray[np.floating] | None  # [S, T*H]


@dataclass(frozen=True, slots=True)
class Reference:
    """Outputs of transformers, the source of its weights, and whether last bits matter."""

    outputs: Outputs
    decoded_by: str
    has_choices: bool


def verify_bundle(checkpoint: Checkpoint, bundle: Path, manifest: Bundle) -> str:
    """Compare logits and hidden taps over a prompt: one prefill, then single tokens.

    Returns:
        One line with the oracle, the largest absolute logit difference, the relative error and the
        top-1 agreement, for a base with hidden taps also their largest absolute difference. It
        states if other tokens replace the prompt, since the tokenizer makes too few.

    Raises:
        EdgeLLMError: outputs differ; torch, transformers or onnxruntime is missing, or transformers
            or onnxruntime cannot compute the checkpoint.
    """
    if not manifest.decoder.is_causal:
        raise UnsupportedModelError(
            f"--verify compares logits, which an encoder ({manifest.decoder.model_type}) has not",
            hint="leave out --verify",
        )
    if manifest.decoder.audio is not None:
        raise UnsupportedModelError(
            "--verify compares texts, not the audio of speech models", hint="leave out --verify"
        )
    token_ids, what = _compared_ids(bundle, manifest)
    reference = _expected(checkpoint, bundle, manifest, token_ids)
    expected = reference.outputs
    found = run_outputs(bundle, manifest, token_ids, max(1, len(token_ids) - _DECODED_TOKENS))
    difference = float(np.abs(found.logits - expected.logits).max())
    error, limit = _relative_error(found.logits, expected.logits), _limit(reference, manifest)
    agreement = float((found.logits.argmax(-1) == expected.logits.argmax(-1)).mean())
    verdict = (
        f"{len(token_ids)} {what} against transformers (float32{reference.decoded_by}): "
        f"max abs logit difference {difference:.2e}, top-1 agreement {agreement:.1%}, "
        f"relative logit error {error:.2e} (limit {limit:.2g} for {manifest.dtype})"
    )
    is_equal = error <= limit and agreement >= _LEAST_AGREEMENT  # also false for NaN
    if found.taps is not None and expected.taps is not None:
        difference = float(np.abs(found.taps - expected.taps).max())
        largest = float(np.abs(expected.taps).max())  # residual streams have a few huge values
        verdict += f", max abs hidden tap difference {difference:.2e} of values to {largest:.2e}"
        is_equal = is_equal and _relative_error(found.taps, expected.taps) <= limit
    if not is_equal:
        raise EdgeLLMError(
            f"--verify: the bundle computes something else than the checkpoint; {verdict}",
            hint="nothing was written; if config.json and weights belong together, report it with "
            "this line",
        )
    return f"verified on {verdict}"


def _relative_error(found: NDArray[np.floating], expected: NDArray[np.floating]) -> float:
    """RMS of the difference, relative to the standard deviation of the expected values."""
    wide = expected.astype(np.float64)
    spread = np.sqrt(np.mean((wide - wide.mean(-1, keepdims=True)) ** 2))
    if not np.isfinite(spread) or spread == 0:
        raise EdgeLLMError(
            "--verify: transformers computes equal logits for all tokens, or some that are not "
            "numbers, so that nothing was compared",
            hint="nothing was written; the weights are damaged or untrained, or export without "
            "--verify",
        )
    return float(np.sqrt(np.mean((found - wide) ** 2)) / spread)


def _limit(reference: Reference, manifest: Bundle) -> float:
    limits = _LIMITS_OF_CHOICES if reference.has_choices else _LIMITS
    return limits[manifest.dtype]


def require_host() -> None:
    """Raise `EdgeLLMError` if a package that `--verify` needs is not installed."""
    for name in ("torch", "transformers", "onnxruntime"):
        if importlib.util.find_spec(name) is None:
            raise EdgeLLMError(f"--verify needs {name}", hint=install("host"))
    import onnxruntime

    if tuple(int(part) for part in onnxruntime.__version__.split(".")[:2]) < _FIRST_WITH_OPSET_24:
        raise EdgeLLMError(
            f"--verify runs opset 24, which onnxruntime {onnxruntime.__version__} does not know",
            hint="install onnxruntime 1.24 or newer (Python 3.11 or newer)",
        )


def _compared_ids(bundle: Path, manifest: Bundle) -> tuple[NDArray[np.int64], str]:
    """Token ids [S] and their description: of the prompt, or else of the vocabulary."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(bundle / "tokenizer.json")).encode(PROMPT).ids
    what, spec = "tokens", manifest.decoder
    if (made := len(set(ids))) <= _DECODED_TOKENS:  # equal ones would not test attention
        what = f"tokens of the vocabulary (the tokenizer makes {made} different ones of the prompt)"
        ids = np.linspace(0, spec.vocab_size - 1, _SPREAD_TOKENS)
    found = np.asarray(ids, np.int64)
    if spec.images is not None:  # without an image transformers may embed another token for it
        found = found[found != spec.images.token_id]
    return found[: spec.max_positions], what


def _expected(
    checkpoint: Checkpoint, bundle: Path, manifest: Bundle, token_ids: NDArray[np.int64]
) -> Reference:
    """Outputs of transformers; quantized checkpoints are dequantized first."""
    source, options = Path(checkpoint.label), ExportOptions(**manifest.options)
    if manifest.quantization == "none" or source.suffix == ".gguf":
        model = load_reference(source, manifest.decoder, options.num_layers)
        if options.lora_dir is not None:
            _add_adapter(model, Path(options.lora_dir).expanduser())
        decoded_by = "; weights decoded by the package gguf" if source.suffix == ".gguf" else ""
        outputs = _transformers_outputs(model, manifest, token_ids)
        return Reference(outputs, decoded_by, _routes_halves(model, manifest))
    with tempfile.TemporaryDirectory(dir=bundle.parent) as folder:
        inputs = write_floats(checkpoint, options, Path(folder))
        model = load_reference(Path(folder), manifest.decoder, options.num_layers)
        round_inputs(model, inputs)
        outputs = _transformers_outputs(model, manifest, token_ids)
        decoded_by = f"; weights decoded by the definition of {manifest.quantization}"
        rounds = any(each.rounds for each in inputs.values())
        return Reference(outputs, decoded_by, rounds or _routes_halves(model, manifest))


def _routes_halves(model: Any, manifest: Bundle) -> bool:
    """Whether experts are routed by float16 logits."""
    has_experts = any("experts" in name for name, _ in model.named_modules())
    return has_experts and manifest.dtype == "float16"


def _add_adapter(model: Any, folder: Path) -> None:
    """Add a LoRA adapter's product to the outputs of the layers that it changes."""
    import torch

    adapter = read_adapter(folder)
    modules = {plain_name(name): module for name, module in model.named_modules()}
    for name, change in adapter.layers.items():
        if name not in modules:  # of layers that were left out
            continue
        a, b = (torch.from_numpy(floats(adapter.tensors, each)) for each in (change.a, change.b))

        modules[name].register_forward_hook(_addition(a, b, change.scale))


def _addition(a: Any, b: Any, scale: float) -> Callable[[Any, Any, Any], Any]:
    return lambda _, inputs, y: y + scale * (inputs[0] @ a.T @ b.T)


def _transformers_outputs(model: Any, manifest: Bundle, token_ids: NDArray[np.int64]) -> Outputs:
    """Outputs of the float32 reference, with the exported number of layers."""
    import torch

    with torch.no_grad():
        result = model(torch.from_numpy(token_ids)[None], output_hidden_states=True)
    taps = [result.hidden_states[tap][0] for tap in manifest.hidden_taps]
    return Outputs(result.logits[0].numpy(), torch.cat(taps, -1).numpy() if taps else None)


def load_reference(source: Path, spec: DecoderSpec, num_layers: int | None) -> Any:
    """The checkpoint in transformers, float32, with the exported number of layers.

    Raises:
        EdgeLLMError: transformers rejects it.
    """
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    register_causal_lms()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    where, extra = source, {}
    if source.suffix == ".gguf":
        if is_split(source):
            raise EdgeLLMError(
                f"transformers reads no GGUF splits, so that nothing was compared: {source}",
                hint=f"join the files: llama-gguf-split --merge {source.name} OUTPUT.gguf",
            )
        where, extra = source.parent, {"gguf_file": source.name}
    try:
        config = AutoConfig.from_pretrained(where, local_files_only=True, **extra)
        vars(config).pop("quantization_config", None)  # the exported tensors are floats
        text = config.get_text_config()
        is_whole = spec.images is not None or text is not config  # with an encoder, used or not
        kind: Any = AutoModelForImageTextToText if is_whole else AutoModelForCausalLM
        wanted = text.num_hidden_layers = num_layers or text.num_hidden_layers
        types = getattr(text, "layer_types", None)
        if types and len(types) > wanted:
            text.layer_types = types[:wanted]
        model, info = kind.from_pretrained(
            where, config=config, dtype=torch.float32, local_files_only=True,
            output_loading_info=True, **extra,
        )  # fmt: skip
    except (StrictDataclassError, OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise EdgeLLMError(
            f"transformers cannot load {source}, so that nothing was compared: {reason[:300]}",
            hint="nothing was written; correct config.json for --verify, or export without it",
        ) from None
    if missing := sorted(info["missing_keys"]):
        raise EdgeLLMError(
            f"--verify: transformers finds no {missing[0]} in the checkpoint, so that nothing was "
            "compared",
            hint="nothing was written; transformers holds these weights in another way: export "
            "without --verify",
        )
    return model


def run_portable(
    bundle: Path, manifest: Bundle, token_ids: NDArray[np.int64], prefill_tokens: int
) -> NDArray[np.float32]:
    """Logits [S, V] of the portable graph: one prefill, then one token at a time."""
    return run_outputs(bundle, manifest, token_ids, prefill_tokens).logits


def _no_images(spec: DecoderSpec) -> dict[str, NDArray[np.floating]]:
    """Image embeddings that no token of a text uses."""
    if spec.images is None:
        return {}
    row = np.zeros((1, spec.hidden_size), spec.kv.dtype)
    levels = np.stack([row] * spec.images.num_deepstack) if spec.images.num_deepstack else None
    return {graph_io.IMAGE_EMBEDS: row} | (
        {} if levels is None else {graph_io.DEEPSTACK_EMBEDS: levels}
    )


def run_outputs(
    bundle: Path, manifest: Bundle, token_ids: NDArray[np.int64], prefill_tokens: int
) -> Outputs:
    """Logits and hidden taps of the portable graph: one prefill, then one token at a time."""
    session = _opened(bundle / manifest.graphs[DECODER].path, manifest)
    states = _States(bundle, manifest)
    spec, kv = manifest.decoder, manifest.decoder.kv
    images = _no_images(spec)
    shapes = [
        (1, heads, len(token_ids), size) for heads, size in map(kv.heads_of, range(kv.num_layers))
    ]
    cache = {
        graph_io.past_name(layer, part): np.zeros(shape, kv.dtype)
        for layer, shape in enumerate(shapes)
        for part in ("key", "value")
    }
    names = [graph_io.LOGITS, *([graph_io.HIDDEN_TAPS] if manifest.hidden_taps else [])]
    presents = [
        graph_io.present_name(layer, part)
        for layer in range(kv.num_layers)
        for part in ("key", "value")
    ]
    results: list[list[np.ndarray]] = []
    begin = 0
    for end in (prefill_tokens, *range(prefill_tokens + 1, len(token_ids) + 1)):
        rows = end - begin
        feed = {
            graph_io.INPUT_IDS: token_ids[None, begin:end],
            graph_io.POSITION_IDS: np.tile(np.arange(begin, end), (spec.position_axes, 1)),
            graph_io.WRITE_INDEX: np.array([begin]),
            graph_io.TREE_MASK: np.tri(rows, dtype=np.bool_),
            graph_io.LOGITS_INDEX: np.arange(rows),
            **images,
            **cache,
            **states.inputs(rows),
        }
        wanted = [*names, *presents, *states.rows]
        outputs = [np.asarray(array) for array in session.run(wanted, feed)]
        states.advance(outputs[len(wanted) - len(states.rows) :], rows)
        cache = dict(zip(cache, outputs[len(names) :], strict=False))
        results.append([array[0] for array in outputs[: len(names)]])
        begin = end
    logits, *taps = (np.concatenate(arrays) for arrays in zip(*results, strict=True))
    return Outputs(logits, taps[0] if taps else None)


def _opened(graph: Path, manifest: Bundle) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    if manifest.quantization != "none":  # fused products would round their inputs
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    opened: str | bytes = str(graph)
    if has_fp4(graph):
        options.add_session_config_entry(_WEIGHTS_OF_BYTES, str(graph.parent))
        opened = open_fp4(graph)
    return ort.InferenceSession(opened, options, providers=["CPUExecutionProvider"])


class _States:
    """States of recurrent layers over several passes, if any."""

    def __init__(self, bundle: Path, manifest: Bundle) -> None:
        spec = manifest.decoder.recurrent
        self.rows = [*spec.rows] if spec is not None else []  # outputs of a pass
        self._arrays: dict[str, NDArray[np.floating]] = {}
        if spec is not None:
            self._commit = _opened(bundle / manifest.graphs[COMMIT].path, manifest)
            kinds = {value.name: value.type for value in self._commit.get_inputs()}
            half = "tensor(float16)"
            self._arrays = {
                name: np.zeros(shape, np.float16 if kinds[name] == half else np.float32)
                for name, shape in spec.states.items()
            }

    def inputs(self, rows: int) -> dict[str, NDArray[Any]]:
        """Inputs of a pass of `rows` tokens."""
        if not self._arrays:
            return {}
        return {**self._arrays, graph_io.PARENT_ROWS: np.arange(-1, rows - 1)}

    def advance(self, found: list[NDArray[Any]], rows: int) -> None:
        """Go on after what a pass gave of all of its rows."""
        if not self._arrays:
            return
        given = dict(zip(self.rows, found, strict=True))
        feed = {**self._arrays, **given, graph_io.COMMIT_ROWS: np.arange(rows)}
        names = [graph_io.next_state_name(name) for name in self._arrays]
        self._arrays = dict(zip(self._arrays, self._commit.run(names, feed), strict=True))
